"""What a Hugging Face config.json says about a decoder, checked and frozen. Host only: never imports jax.

A field that changes what the model computes is either read here or refused; transformers' defaults fill absent ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelLoadError
from .fields import Fields, read_json
from .rope import RopeConfig, parse_rope


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one Llama-family decoder; hashable, so that it can be static under jit.

    layer_windows: a layer's sliding window W (a token sees itself and the W - 1 before it), or None for all.
    head_dim: of queries, keys and values alike. qkv_bias, o_bias, mlp_bias: which linears have a bias.
    qk_norm: RMSNorm over head_dim on queries and keys before rope. dtype: the checkpoint's as config.json names it
    ("float32", "float16", "bfloat16"), None where it names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    hidden_act: Literal["silu"]
    dtype: str | None


@dataclass(frozen=True)
class _Family:
    """transformers' defaults of one class. kv_heads, head_dim: None means as many heads / hidden_size // heads."""

    model_type: str
    kv_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", None, 2048),
    "MistralForCausalLM": _Family("mistral", 8, 131072),
    "Qwen2ForCausalLM": _Family("qwen2", 32, 32768),
    "Qwen3ForCausalLM": _Family("qwen3", 32, 32768, head_dim=128),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

# Fields by which other models, or forks of these, change the computation, and the values that leave it alone (so do
# absence and null). transformers' own four classes ignore most of them: a checkpoint that sets one expects other code.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_encoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "pretraining_tp": (0, 1),
    "text_config": (),
    "vision_config": (),
    "per_layer_config": ({},),
    "block_configs": ([],),
    "pruned_heads": ({},),
    "compression_config": ({},),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "clip_qkv": (),
    "qk_layernorm": (False,),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False, 0),
    "dual_chunk_attention_config": ({},),
    "sliding_window_pattern": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "alibi": (False,),
}
_DTYPES = ("float32", "float16", "bfloat16")


def load_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """(parsed configuration, raw fields) of folder/config.json. Raises: ModelLoadError naming file and field."""
    path = folder / "config.json"
    raw = read_json(path)
    return parse_config(raw, str(path)), raw


def parse_config(raw: dict[str, Any], source: str) -> ModelConfig:
    """Reads the fields of a config.json; `source` names it in errors.

    Raises: ModelLoadError naming source, field and value: an unsupported architecture or computation, a quantised
    checkpoint, a missing or malformed size.
    """
    architecture = _architecture(raw, source)
    family, fields = _FAMILIES[architecture], Fields(raw, source)
    _refuse_other_maths(raw, fields, architecture)
    heads, kv_heads, head_dim = _heads(fields, family)
    layers = fields.integer("num_hidden_layers")
    max_positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    qkv_bias, o_bias, mlp_bias = _biases(fields, family)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(raw, source, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.model_type == "qwen3",
        layer_windows=_layer_windows(fields, family, layers),
        hidden_act="silu",
        dtype=_dtype(fields),
    )


def _architecture(raw: dict[str, Any], source: str) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"{source}: architectures must name exactly one of {supported}, got {names!r}")
    if names[0] not in _FAMILIES:
        raise ModelLoadError(f"{source}: architecture {names[0]!r} is not supported: serve one of {supported}")
    model_type, expected = raw.get("model_type"), _FAMILIES[names[0]].model_type
    if model_type not in (None, expected):
        # transformers goes by model_type, other engines by the architecture: which was meant cannot be known
        raise ModelLoadError(
            f"{source}: model_type={model_type!r} contradicts architectures=[{names[0]!r}] (model_type {expected!r}): "
            "correct the wrong one"
        )
    return names[0]


def _refuse_other_maths(raw: dict[str, Any], fields: Fields, architecture: str) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.error(
            "quantization_config",
            f"(quant_method={method!r}): quantised checkpoints are not supported: serve the original",
        )
    for name, neutral in _NEUTRAL.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            raise fields.error(
                name,
                f"= {value!r} changes what {architecture} computes and is not supported: serve a checkpoint without it",
            )
    qwen3 = architecture == "Qwen3ForCausalLM"
    if raw.get("use_qk_norm") not in (None, qwen3):
        raise fields.error("use_qk_norm", f"= {raw['use_qk_norm']!r} is not supported for {architecture}")
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):  # two names of one function
        raise fields.error("hidden_act", f"= {act!r} is not supported: only 'silu' is")


def _heads(fields: Fields, family: _Family) -> tuple[int, int, int]:
    """(query heads, KV heads, head_dim)."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    default = heads if family.kv_heads is None else family.kv_heads
    kv_heads = fields.integer("num_key_value_heads", default, null=heads)
    if heads % kv_heads:
        raise fields.error(
            "num_attention_heads", f"= {heads} must be a multiple of num_key_value_heads = {kv_heads}: set both"
        )
    if family.head_dim is not None:
        head_dim = fields.integer("head_dim", family.head_dim)
    else:
        head_dim = fields.integer("head_dim", None, null=None)
        if head_dim is None and hidden % heads:
            raise fields.error(
                "hidden_size", f"= {hidden} is not a multiple of num_attention_heads = {heads}: set head_dim"
            )
        head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise fields.error("head_dim", f"= {head_dim} must be even: rope turns pairs of dimensions")
    return heads, kv_heads, head_dim


def _biases(fields: Fields, family: _Family) -> tuple[bool, bool, bool]:
    """(qkv, o, mlp). As in transformers, a class ignores the fields it lacks: such biases are extra tensors."""
    if family.model_type == "qwen2":
        return True, False, False
    if family.model_type == "mistral":
        return False, False, False
    attention = fields.boolean("attention_bias", False)
    return attention, attention, family.model_type == "llama" and fields.boolean("mlp_bias", False)


def _layer_windows(fields: Fields, family: _Family, layers: int) -> tuple[int | None, ...]:
    types = _layer_types(fields, layers)
    if family.model_type == "llama":
        if fields.integer("sliding_window", None, null=None) is not None:
            raise fields.error(
                "sliding_window", f"= {fields.raw['sliding_window']!r}: LlamaForCausalLM has none: remove it"
            )
        windows: tuple[int | None, ...] = (None,) * layers
    elif family.model_type == "mistral":
        windows = (fields.integer("sliding_window", 4096, null=None),) * layers
    else:
        return _qwen_windows(fields, types, layers)
    if types and types != tuple("full_attention" if w is None else "sliding_attention" for w in windows):
        raise fields.error("layer_types", f"= {list(types)!r} contradicts sliding_window = {windows[0]!r}: remove it")
    return windows


def _qwen_windows(fields: Fields, types: tuple[str, ...], layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window", 4096, null=None) if fields.boolean("use_sliding_window", False) else None
    if not types:
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple(window if i >= first else None for i in range(layers))
    if window is None and "sliding_attention" in types:
        raise fields.error(
            "layer_types", "has sliding_attention layers, but use_sliding_window or sliding_window is off: set both"
        )
    return tuple(window if t == "sliding_attention" else None for t in types)


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """One name a layer, or () where the file has none."""
    types = fields.raw.get("layer_types")
    if types is None:
        return ()
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", f"must list one type for each of {layers} layers, got {types!r}")
    types = ["full_attention" if t == "attention" else t for t in types]
    for t in types:
        if t not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"has {t!r}: only full_attention and sliding_attention are supported")
    return tuple(types)


def _dtype(fields: Fields) -> str | None:
    name = "torch_dtype" if fields.raw.get("dtype") is None else "dtype"
    value = fields.raw.get(name)
    if value in (None, "auto"):
        return None
    short = value.removeprefix("torch.") if isinstance(value, str) else value
    if short not in (*_DTYPES, "float64"):
        raise fields.error(name, f"= {value!r} is not supported: serve a checkpoint in one of {', '.join(_DTYPES)}")
    return "float32" if short == "float64" else short  # float64 weights are rounded once when they are loaded
