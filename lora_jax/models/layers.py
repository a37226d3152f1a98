"""Building blocks of Llama-family decoders as plain Flax NNX modules. Tokens are flat: x is [T, hidden]."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.deferred_norm import DeferredNorm, Normed
from lora_jax.kernels.residual_matmul import fits_residual, residual_matmul
from lora_jax.kernels.rope_cache import HeadNorms
from lora_jax.kernels.skinny_matmul import fits, skinny_matmul
from lora_jax.kernels.swiglu import swiglu

from ..lora.apply import lora_linear, lora_operands, register_lora_class
from .config import ModelConfig

Rope = tuple[jax.Array, jax.Array]
"""cos, sin: float32 [T, D / 2]."""


class StepInputs(Protocol):
    """What a phase gives to every layer: how its tokens attend, and the implementation ("triton" or "xla") of its kernels."""

    @property
    def implementation(self) -> str: ...

    def attend(
        self,
        qkv: jax.Array,
        rope: Rope,
        kv: jax.Array,
        *,
        arrivals: jax.Array | None,
        heads: int,
        window: int | None,
        norms: HeadNorms | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """qkv [T, (H + 2K) * D], or partial sums [S, ...] of it -> (heads' outputs [T, H * D], kv pages with the tokens,
        arrivals)."""
        ...


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, rounded to x's dtype, times scale [dim] (Zhang and Sennrich, 2019; order as in transformers)."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def add(self, x: jax.Array, y: jax.Array | None, implementation: str) -> tuple[jax.Array, jax.Array]:
        """(x + y, its norm), both [T, dim]; y [T, dim], partial sums [S, T, dim] or None."""
        return add_rms_norm(x, y, self.scale[...], eps=self.eps, implementation=implementation)


class Stream(NamedTuple):
    """The residual stream x [T, hidden], and its norm for the sublayer that follows. arrivals: see `when_last`; None where the
    kernels are not in use."""

    x: jax.Array
    normed: Normed
    arrivals: jax.Array | None

    @classmethod
    def start(cls, x: jax.Array, norm: RMSNorm, kv_heads: int, implementation: str) -> Stream:
        """kv_heads: of the attention that follows."""
        pieces = max(x.shape[1] // 64, x.shape[0] * kv_heads)  # of a residual product, of an attention
        return cls(*norm.add(x, None, implementation), new_arrivals(pieces) if implementation == "triton" else None)


def array(x: Normed) -> jax.Array:
    return x.normed() if isinstance(x, DeferredNorm) else x


def _own_kernel(linear: nnx.Linear, implementation: str) -> bool:
    """Whether a kernel of ours may take the linear's place: adapters and biases are left to the linear itself."""
    return implementation == "triton" and type(linear) is nnx.Linear and linear.bias is None


def project(linear: nnx.Linear, x: Normed, implementation: str) -> jax.Array:
    """linear(x) [T, out], or float32 partial sums [S, T, out] of it, for a kernel that sums what it reads: with few rows and
    no adapter or bias, where the kernels are in use."""
    inputs, outputs = linear.kernel.shape
    if _own_kernel(linear, implementation) and fits(x.shape[0], inputs, outputs):
        return skinny_matmul(x, linear.kernel[...])
    return linear(array(x))


def activate(linear: nnx.Linear, x: Normed, implementation: str) -> jax.Array:
    """silu(gate(x)) * up(x) [T, F], of a linear that gives gate and up side by side."""
    inputs, outputs = linear.kernel.shape
    if _own_kernel(linear, implementation) and fits(x.shape[0], inputs, outputs // 2):
        return swiglu(x, linear.kernel[...])
    gate, up = jnp.split(linear(array(x)), 2, -1)
    return nnx.silu(gate) * up


def add(stream: Stream, linear: nnx.Linear, y: jax.Array, norm: RMSNorm, implementation: str) -> Stream:
    """The stream with linear(y) added to it, and its norm: as one kernel with few rows and no adapter or bias."""
    inputs, outputs = linear.kernel.shape
    fused = stream.arrivals is not None and fits_residual(y.shape[0], inputs, outputs, y.dtype)
    if fused and _own_kernel(linear, implementation):
        kernel, scale = linear.kernel[...], norm.scale[...]
        return Stream(*residual_matmul(y, kernel, stream.x, scale, stream.arrivals, eps=norm.eps))
    x, normed = norm.add(stream.x, project(linear, y, implementation), implementation)
    return Stream(x, normed, stream.arrivals)


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


def rope_tables(positions: jax.Array, inv_freq: jax.Array) -> Rope:
    """positions int32 [T], inv_freq float32 [D/2] (Su et al., RoFormer, 2021)."""
    angles = positions[:, None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles), jnp.sin(angles)


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

    def __call__(
        self, stream: Stream, following: RMSNorm, rope: Rope, kv: jax.Array, inputs: StepInputs
    ) -> tuple[Stream, jax.Array]:
        norms = None
        if hasattr(self, "q_norm"):
            norms = HeadNorms(self.q_norm.scale[...], self.k_norm.scale[...], self.q_norm.eps)
        qkv = project(self.qkv_proj, stream.normed, inputs.implementation)
        out, kv, arrivals = inputs.attend(
            qkv, rope, kv, arrivals=stream.arrivals, heads=self.heads, window=self.window, norms=norms
        )
        stream = stream._replace(arrivals=arrivals)
        return add(stream, self.o_proj, out, following, inputs.implementation), kv


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) with gate and up fused (Shazeer, "GLU variants improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        kw: dict[str, Any] = dict(use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.gate_up_proj = nnx.Linear(config.hidden_size, 2 * config.intermediate_size, **kw)
        self.down_proj = nnx.Linear(config.intermediate_size, config.hidden_size, **kw)

    def __call__(self, stream: Stream, following: RMSNorm, implementation: str) -> Stream:
        y = activate(self.gate_up_proj, stream.normed, implementation)
        return add(stream, self.down_proj, y, following, implementation)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP. Each sublayer adds its result to the stream and norms it for the one that follows, so a
    layer's first norm is applied by the layer before it."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, layer, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self, stream: Stream, following: RMSNorm, rope: Rope, kv: jax.Array, inputs: StepInputs
    ) -> tuple[Stream, jax.Array]:
        """following: the norm of what comes after this layer."""
        stream, kv = self.self_attn(stream, self.post_attention_layernorm, rope, kv, inputs)
        return self.mlp(stream, following, inputs.implementation), kv
