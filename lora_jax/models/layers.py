"""Building blocks of Llama-family decoders as plain Flax NNX modules. Tokens are flat: x is [T, hidden]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..lora.apply import lora_linear, lora_operands, register_lora_class
from .config import ModelConfig

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int | None], tuple[jax.Array, jax.Array]]
"""attend(q [T, H, D], k [T, K, D], v [T, K, D], kv pages, window) -> (out [T, H, D], kv pages with k and v written)."""


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, rounded to x's dtype, times scale [dim] (Zhang and Sennrich, 2019; order as in transformers)."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        return self.scale[...] * x32.astype(x.dtype)


class TiedHead(nnx.Module):
    """Logits through the transposed input embedding [V, hidden], which it shares with the `nnx.Embed` it is made from."""

    def __init__(self, embed: nnx.Embed):
        self.embedding = embed.embedding

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, self.embedding[...], (((x.ndim - 1,), (1,)), ((), ())))


class LoRATiedHead(TiedHead):
    """`TiedHead` after `attach`: the adapter changes the logits and never the embedding."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return lora_linear(x, self.embedding[...].T, None, **lora_operands(self))


register_lora_class(TiedHead, LoRATiedHead)


def rope_tables(positions: jax.Array, inv_freq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """positions int32 [T], inv_freq float32 [D/2] -> cos, sin float32 [T, 1, D/2] (Su et al., RoFormer, 2021)."""
    angles = positions[:, None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def apply_rope(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [T, heads, D], rotated as halves (Hugging Face layout)."""
    cos, sin = rope
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with one fused q, k, v projection. q_norm and k_norm exist where the model has them."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d
        self.window = config.layer_windows[layer]
        kw: dict[str, Any] = dict(dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.qkv_proj = nnx.Linear(config.hidden_size, (heads + 2 * kv_heads) * d, use_bias=config.qkv_bias, **kw)
        self.o_proj = nnx.Linear(heads * d, config.hidden_size, use_bias=config.o_bias, **kw)
        if config.qk_norm:
            self.q_norm = RMSNorm(d, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(d, config.rms_norm_eps, dtype)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array, attend: Attend):
        t, d = x.shape[0], self.head_dim
        cuts = (self.heads * d, (self.heads + self.kv_heads) * d)
        q, k, v = (part.reshape(t, -1, d) for part in jnp.split(self.qkv_proj(x), cuts, axis=-1))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        out, kv = attend(apply_rope(q, rope), apply_rope(k, rope), v, kv, self.window)
        return self.o_proj(out.reshape(t, -1)), kv


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) with gate and up fused (Shazeer, "GLU variants improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        kw: dict[str, Any] = dict(use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.gate_up_proj = nnx.Linear(config.hidden_size, 2 * config.intermediate_size, **kw)
        self.down_proj = nnx.Linear(config.intermediate_size, config.hidden_size, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, -1)
        return self.down_proj(nnx.silu(gate) * up)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, layer, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array, attend: Attend):
        out, kv = self.self_attn(self.input_layernorm(x), rope, kv, attend)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), kv
