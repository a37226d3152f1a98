"""Which modules of a model carry adapters, and in which stack their weights lie. Host only: never imports jax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .adapter import TargetSpec


@dataclass(frozen=True)
class LoRASite:
    """One module of the tree. Modules of one group have equal shapes and share one stack of A and B, indexed by `layer`.

    slices: widths of the output parts that have an A of their own (q, k, v of a fused projection); names: their Hugging Face
    names. kind "embedding": in_features is the vocabulary. head: applied to selected rows after the decoder, not to all tokens.
    """

    path: tuple[str | int, ...]
    group: str
    layer: int
    in_features: int
    slices: tuple[int, ...]
    names: tuple[str, ...]
    kind: Literal["linear", "embedding"] = "linear"
    head: bool = False


@dataclass(frozen=True)
class GroupShape:
    """Shapes of one group's stacks: A [layers, slots, len(slices) * rank, in] ([layers, slots, in, rank] for an embedding),
    B [layers, slots, rank, sum(slices)]."""

    layers: int
    in_features: int
    slices: tuple[int, ...]
    kind: Literal["linear", "embedding"]
    head: bool

    def shapes(self, slots: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        b = (self.layers, slots, rank, sum(self.slices))
        if self.kind == "embedding":
            return (self.layers, slots, self.in_features, rank), b
        return (self.layers, slots, len(self.slices) * rank, self.in_features), b


def group_shapes(sites: Iterable[LoRASite]) -> dict[str, GroupShape]:
    """Group name -> shape; every site of a group must agree."""
    groups: dict[str, GroupShape] = {}
    for site in sites:
        layers = max(site.layer + 1, groups[site.group].layers if site.group in groups else 0)
        shape = GroupShape(layers, site.in_features, site.slices, site.kind, site.head)
        old = groups.get(site.group)
        same = old is None or (old.in_features, old.slices, old.kind) == (site.in_features, site.slices, site.kind)
        assert same, f"{site.path} does not fit group {site.group}: {old}"
        groups[site.group] = shape
    return groups


def decoder_linears(groups: Mapping[str, GroupShape]) -> tuple[str, ...]:
    """Names of the groups that every token of a step passes through as linears."""
    return tuple(name for name, shape in groups.items() if shape.kind == "linear" and not shape.head)


def target_specs(sites: Iterable[LoRASite]) -> dict[str, TargetSpec]:
    """Hugging Face module name -> TargetSpec."""
    return {
        name: TargetSpec(name, site.kind, site.in_features, width, site.group, site.layer, index)
        for site in sites
        for index, (name, width) in enumerate(zip(site.names, site.slices, strict=True))
    }
