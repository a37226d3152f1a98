"""From tensor names in an adapter file to modules of the base. Host only: never imports jax.

Files differ in how they name one module: PEFT writes base_model.model.<name>; raw state dicts add the adapter's name
after lora_A; adapters of the inner model lack "model."; those of a wrapper have "language_model". The wrappers at the
front of a path carry no meaning, so names are compared without them. A name that still has no unique place is an error,
never skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import AdapterError

_PEFT_PREFIX = "base_model.model."
_FRONT = {"base_model", "model", "language_model", "module"}
# torch.compile, FSDP and activation checkpointing put these anywhere; they never name a module of the model
_ANYWHERE = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_EMBEDDING = re.compile(
    r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(?:\.(?!weight$)(?P<adapter>[^.]+))?(?:\.weight)?"
)
_VELORA = re.compile(r".+\.lora_velora_embed(?:\.[^.]+)?")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# tensors whose meaning is known and not supported: part of the name -> field and reason
_UNSUPPORTED = (
    ("lora_magnitude_vector", "DoRA (use_dora) is not supported: merge the adapter with PEFT, or train without DoRA"),
    (".modules_to_save.", "modules_to_save is not supported: it replaces a whole module of the base"),
    ("trainable_tokens", "trainable_token_indices is not supported: it replaces rows of the embedding"),
    ("token_adapter", "trainable_token_indices is not supported: it replaces rows of the embedding"),
)


@dataclass(frozen=True)
class TargetSpec:
    """One module of the base that can carry LoRA.

    name: full Hugging Face module name. in_features, out_features: of an embedding, vocabulary and hidden size.
    group, layer, slice: the stack of equal modules, the index in it, and the output slice of a fused projection.
    """

    name: str
    kind: Literal["linear", "embedding"]
    in_features: int
    out_features: int
    group: str
    layer: int
    slice: int = 0


@dataclass(frozen=True)
class TensorPair:
    """The two tensors of one module. trained_as: the module's name in the model that PEFT adapted."""

    target: TargetSpec
    trained_as: str
    a: str
    b: str


@dataclass
class FileMap:
    """Where each tensor of a file belongs. pairs: by target name. base_copies: full base weights, tensor -> target."""

    pairs: dict[str, TensorPair] = field(default_factory=dict)
    base_copies: dict[str, TargetSpec] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Half:
    tensor: str
    side: str
    trained_as: str
    target: TargetSpec


def core_name(module: str) -> str:
    """`module` without the wrappers around it: base_model.model.model.layers.0.x -> layers.0.x."""
    parts = [p for p in module.split(".") if p not in _ANYWHERE]
    first = next((i for i, p in enumerate(parts) if p not in _FRONT), len(parts))
    return ".".join(parts[first:])


class TargetIndex:
    """Finds the target that a module name of a file means."""

    def __init__(self, targets: Mapping[str, TargetSpec]):
        self._targets = targets
        self._by_core: dict[str, list[TargetSpec]] = {}
        for spec in targets.values():
            self._by_core.setdefault(core_name(spec.name), []).append(spec)

    def find(self, module: str) -> TargetSpec | None:
        """None: no such module, or more than one could be meant."""
        exact = self._targets.get(module.removeprefix(_PEFT_PREFIX))
        if exact is not None:
            return exact
        candidates = self._by_core.get(core_name(module), [])
        return candidates[0] if len(candidates) == 1 else None

    def why_not(self, module: str) -> str:
        """Why `module` has no place in this base."""
        core = core_name(module)
        if len(self._by_core.get(core, [])) > 1:
            return f"it could mean any of {', '.join(s.name for s in self._by_core[core])}"
        stem, _, last = core.rpartition(".")
        siblings = {c.rpartition(".")[2] for c in self._by_core if c.rpartition(".")[0] == stem}
        if last in _FUSED and siblings & set(_FUSED[last]):
            parts = ", ".join(_FUSED[last])
            return f"it was made for a base with a fused {last}, this base has {parts} apart: serve it on its own base"
        for fused, parts in _FUSED.items():
            if last in parts and fused in siblings:
                return f"it was made for a base with {last} apart, this base has {fused}: serve it on its own base"
        layer, depth = _layer_of(core), self._depth()
        if layer is not None and depth is not None and layer >= depth:
            return f"this base has layers 0 to {depth - 1}, the adapter was made for a deeper one"
        kinds = sorted({c.rpartition(".")[2] for c in self._by_core})
        return f"LoRA can be served on {', '.join(kinds) or 'nothing'} of this base"

    def _depth(self) -> int | None:
        layers = [n for c in self._by_core if (n := _layer_of(c)) is not None]
        return max(layers) + 1 if layers else None


def _layer_of(core: str) -> int | None:
    return next((int(p) for p in core.split(".") if p.isascii() and p.isdigit() and len(p) < 9), None)


def map_tensors(names: Iterable[str], targets: Mapping[str, TargetSpec], *, velora: bool = False) -> FileMap:
    """Sorts every tensor of a file to its module.

    Raises: AdapterError naming the tensor that is unknown, unsupported, without its other half or there
    twice; also when the file is empty or holds nothing but copies of base weights.
    """
    index, out = TargetIndex(targets), FileMap()
    halves: dict[str, dict[str, _Half]] = {}
    adapters: dict[str | None, str] = {}  # adapter name in the tensor names -> one of those tensors
    for name in sorted(names):
        match = _LINEAR.fullmatch(name) or _EMBEDDING.fullmatch(name)
        if match is not None:
            adapters.setdefault(match["adapter"], name)
            half = _half(index, match)
            other = halves.setdefault(half.target.name, {}).setdefault(half.side, half)
            if other is not half:
                raise AdapterError(
                    f"tensors {other.tensor!r} and {name!r} both are lora_{half.side} of {half.target.name}"
                )
        elif velora and _VELORA.fullmatch(name):  # used by VeLoRA's backward pass alone
            out.ignored.append(name)
        else:
            out.base_copies[name] = _base_copy(index, name)
    if len(adapters) > 1:
        first, second = sorted(adapters.values())[:2]
        raise AdapterError(f"tensors {first!r} and {second!r} belong to two adapters: a file must hold one")
    if not halves:
        what = "no LoRA tensors, only copies of base weights" if out.base_copies else "no tensors"
        raise AdapterError(f"the weights file holds {what}: loading it would change nothing")
    out.pairs = {module: _pair(sides) for module, sides in halves.items()}
    return out


def _half(index: TargetIndex, match: re.Match[str]) -> _Half:
    name, module = match.string, match["module"]
    spec = index.find(module)
    if spec is None:
        raise AdapterError(f"tensor {name!r} has no place in this base: {index.why_not(module)}")
    kind = "embedding" if ".lora_embedding_" in name else "linear"
    if spec.kind != kind:
        raise AdapterError(f"tensor {name!r} is LoRA of a layer of kind {kind}, {spec.name} is of kind {spec.kind}")
    return _Half(name, match["side"], module.removeprefix(_PEFT_PREFIX), spec)


def _pair(sides: dict[str, _Half]) -> TensorPair:
    for here, gone in ("AB", "BA"):
        if gone not in sides:
            raise AdapterError(f"tensor {sides[here].tensor!r} is lora_{here} without its lora_{gone}")
    a, b = sides["A"], sides["B"]
    if a.trained_as != b.trained_as:
        raise AdapterError(
            f"tensors {a.tensor!r} and {b.tensor!r} name one module in two ways: do they belong together?"
        )
    return TensorPair(a.target, a.trained_as, a.tensor, b.tensor)


def _base_copy(index: TargetIndex, name: str) -> TargetSpec:
    """The target whose base weight `name` may be a copy of. Raises: AdapterError for every other tensor."""
    for part, why in _UNSUPPORTED:
        if part in name:
            raise AdapterError(f"tensor {name!r}: {why}")
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        what = "lora_bias" if ".lora_" in name else "a trained bias (bias)"
        raise AdapterError(f"tensor {name!r}: {what} is not supported; train with bias='none' and lora_bias=False")
    spec = index.find(module.removesuffix(".base_layer")) if leaf == "weight" and ".lora_" not in name else None
    if spec is None:
        raise AdapterError(
            f"tensor {name!r} is of unknown meaning: it is no lora_A or lora_B, and no weight of a module with LoRA"
        )
    return spec
