"""Random adapters in PEFT's format: a benchmark needs some of any rank for any model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ..models.config import ModelConfig
from ..models.llama import lora_targets
from ..request import LoRARequest
from .traffic import decoder_linears


def write_random_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """A bfloat16 adapter on all linears of the decoder layers. Returns folder, which is made."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    targets = lora_targets(config)
    names = decoder_linears(config)
    tensors = {}
    for name in names:
        spec = targets[name]
        for part, shape in (("lora_A", (rank, spec.in_features)), ("lora_B", (spec.out_features, rank))):
            values = rng.standard_normal(shape, dtype=np.float32) * 0.02
            tensors[f"base_model.model.{name}.{part}.weight"] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rsplit(".", 1)[1] for name in names}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def load_random_adapters(engine: Any, count: int, rank: int) -> list[LoRARequest]:
    """Makes and loads `count` adapters; their files are gone afterwards."""
    names = [f"random-{i}" for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="lora-jax-bench-") as folder:
        for seed, name in enumerate(names):
            engine.load_lora(name, str(write_random_adapter(Path(folder, name), engine.model_config, rank, seed)))
    return [LoRARequest(name) for name in names]
