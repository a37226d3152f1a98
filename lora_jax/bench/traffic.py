"""The bytes that a decode step cannot avoid to read: the floor that measured times stand beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ..models.config import ModelConfig
from ..models.llama import hf_plan, lora_targets


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one decode step, each thing read once."""

    weights: int
    kv: int
    adapters: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.adapters


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Every parameter, but of an embedding table that is not also the output head: only a row a token is read of it."""
    embedding = ("model", "embed_tokens", "embedding")
    read = (s.shape for path, s in hf_plan(config).items() if path != embedding or config.tie_word_embeddings)
    return sum(map(prod, read)) * itemsize


def kv_bytes(config: ModelConfig, itemsize: int, context: int) -> int:
    """Keys and values of one sequence that a step attends to. context: tokens, the new one included."""
    seen = sum(context if window is None else min(context, window) for window in config.layer_windows)
    return seen * 2 * config.num_kv_heads * config.head_dim * itemsize


def decoder_linears(config: ModelConfig, linears: Sequence[str] = ()) -> list[str]:
    """Hugging Face names of these linears in all decoder layers, none: of all, which is what "all linear" means to PEFT."""
    names = [name for name in lora_targets(config) if ".layers." in name]
    return [name for name in names if not linears or name.rsplit(".", 1)[1] in linears]


def adapter_bytes(config: ModelConfig, itemsize: int, rank: int, linears: Sequence[str] = ()) -> int:
    """A and B of one adapter on these linears of the decoder layers, none: on all."""
    targets = lora_targets(config)
    names = decoder_linears(config, linears)
    return sum(targets[n].in_features + targets[n].out_features for n in names) * rank * itemsize


def decode_step_bytes(
    config: ModelConfig, itemsize: int, rows: int, contexts: Iterable[int], active_adapters: int = 0, rank: int = 0
) -> StepBytes:
    """The average over decode steps. contexts: tokens of every row, step by step; itemsize: bytes of a number."""
    kv = [kv_bytes(config, itemsize, context) for context in contexts]
    return StepBytes(
        weights=weight_bytes(config, itemsize),
        kv=round(rows * sum(kv) / len(kv)) if kv else 0,
        adapters=active_adapters * adapter_bytes(config, itemsize, rank) if active_adapters else 0,
    )
