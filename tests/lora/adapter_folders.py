"""Small adapter folders written by hand, without PEFT, and the base they fit: hidden 8, 2 layers, grouped-query attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lora_jax.lora.adapter import Adapter, TargetSpec, read_adapter

HIDDEN, KV, INTER, VOCAB, LAYERS, RANK = 8, 4, 12, 10, 2, 2


def base_targets(layers: int = LAYERS) -> dict[str, TargetSpec]:
    """The modules of the base that can carry LoRA."""
    specs = [
        TargetSpec("lm_head", "linear", HIDDEN, VOCAB, "lm_head", 0),
        TargetSpec("model.embed_tokens", "embedding", VOCAB, HIDDEN, "embed", 0),
    ]
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        specs += [
            TargetSpec(f"{attention}.q_proj", "linear", HIDDEN, HIDDEN, "qkv", i, 0),
            TargetSpec(f"{attention}.k_proj", "linear", HIDDEN, KV, "qkv", i, 1),
            TargetSpec(f"{attention}.v_proj", "linear", HIDDEN, KV, "qkv", i, 2),
            TargetSpec(f"{attention}.o_proj", "linear", HIDDEN, HIDDEN, "o", i),
            TargetSpec(f"{mlp}.gate_proj", "linear", HIDDEN, INTER, "gate_up", i, 0),
            TargetSpec(f"{mlp}.up_proj", "linear", HIDDEN, INTER, "gate_up", i, 1),
            TargetSpec(f"{mlp}.down_proj", "linear", INTER, HIDDEN, "down", i),
        ]
    return {s.name: s for s in specs}


def config(**changes: Any) -> dict[str, Any]:
    """A plain configuration; None as a value removes the field."""
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 3, "bias": "none"}
    fields |= {"target_modules": ["q_proj", "v_proj"], **changes}
    return {k: v for k, v in fields.items() if v is not None}


def pair(
    name: str, out: int, in_: int, rank: int = RANK, seed: int = 0, embedding: bool = False
) -> dict[str, np.ndarray]:
    """Both tensors of one module, named as PEFT names them."""
    rng = np.random.default_rng([seed, len(name), out, in_])
    a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
    stem = f"base_model.model.{name}"
    shapes = {f"{stem}.{a}": (rank, in_), f"{stem}.{b}": (out, rank)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def tensors(layers: int = LAYERS, rank: int = RANK) -> dict[str, np.ndarray]:
    """LoRA on every q_proj and v_proj."""
    out: dict[str, np.ndarray] = {}
    for i in range(layers):
        out |= pair(f"model.layers.{i}.self_attn.q_proj", HIDDEN, HIDDEN, rank, seed=i)
        out |= pair(f"model.layers.{i}.self_attn.v_proj", KV, HIDDEN, rank, seed=i)
    return out


def write(
    folder: Path, fields: dict[str, Any] | str | bytes | None, weights: dict[str, np.ndarray] | bytes | None
) -> Path:
    """Writes an adapter folder; None leaves a file out, bytes are written as they are."""
    folder.mkdir(exist_ok=True)
    if fields is not None:
        text = json.dumps(fields) if isinstance(fields, dict) else fields
        (folder / "adapter_config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    if isinstance(weights, bytes):
        (folder / "adapter_model.safetensors").write_bytes(weights)
    elif weights is not None:
        save_file(weights, folder / "adapter_model.safetensors")
    return folder


def load(folder: Path, name: str = "a", **options: Any) -> Adapter:
    """read_adapter against the base of this file, not tied, with slots of rank 8."""
    return read_adapter(folder, name, base_targets(), **({"max_rank": 8, "tied_embeddings": False} | options))
