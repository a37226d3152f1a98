"""Known model shapes, for load_format="dummy": benchmarks and tests without a checkpoint. Host only."""

from __future__ import annotations

from typing import Any

from ..errors import ModelLoadError
from .config import ModelConfig, parse_config


def _llama(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, max_len: int, **more: Any
) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        **more,
    }


def _other(family: str, *sizes: int, **more: Any) -> dict:
    return {**_llama(*sizes), "architectures": [f"{family}ForCausalLM"], **more}  # type: ignore[arg-type]


_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llama(512, 64, 128, 2, 4, 2, 2048),
    "smollm2-135m": _llama(49152, 576, 1536, 30, 9, 3, 8192, rope_theta=1e5, tie_word_embeddings=True),
    "tinyllama-1.1b": _llama(32000, 2048, 5632, 22, 32, 4, 2048),
    "llama-3.2-1b": _llama(
        128256,
        2048,
        8192,
        16,
        32,
        8,
        131072,
        rope_theta=5e5,
        rope_scaling={**_LLAMA31_ROPE, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "llama-2-7b": _llama(32000, 4096, 11008, 32, 32, 32, 4096),
    "llama-2-13b": _llama(32000, 5120, 13824, 40, 40, 40, 4096),
    "llama-2-70b": _llama(32000, 8192, 28672, 80, 64, 8, 4096),
    "llama-3-8b": _llama(128256, 4096, 14336, 32, 32, 8, 8192, rope_theta=5e5),
    "llama-3.1-8b": _llama(128256, 4096, 14336, 32, 32, 8, 131072, rope_theta=5e5, rope_scaling=_LLAMA31_ROPE),
    "llama-3-70b": _llama(128256, 8192, 28672, 80, 64, 8, 8192, rope_theta=5e5),
    "mistral-7b": _other("Mistral", 32000, 4096, 14336, 32, 32, 8, 32768, sliding_window=4096),
    "qwen2-0.5b": _other("Qwen2", 151936, 896, 4864, 24, 14, 2, 131072, tie_word_embeddings=True, **_QWEN),
    "qwen2-7b": _other("Qwen2", 152064, 3584, 18944, 28, 28, 4, 131072, **_QWEN),
    "qwen3-0.6b": _other("Qwen3", 151936, 1024, 3072, 28, 16, 8, 40960, tie_word_embeddings=True, **_QWEN),
    "qwen3-8b": _other("Qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, **_QWEN),
}


def known_shape(name: str) -> ModelConfig:
    """The configuration of a known shape. Raises: ModelLoadError listing the names."""
    if name not in SHAPES:
        raise ModelLoadError(
            f"{name!r} is no known shape: use a folder with a config.json, or one of {', '.join(SHAPES)}"
        )
    return parse_config(SHAPES[name], f"shape {name}")
