"""Building blocks of Llama-family decoders as plain Flax NNX modules. Tokens are flat: x is [T, hidden]."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from lora_jax.kernels.adapters import Adapters, adapter_counters
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.deferred_norm import DeferredNorm, Normed
from lora_jax.kernels.residual_matmul import fits_residual, residual_matmul
from lora_jax.kernels.rope_cache import HeadNorms
from lora_jax.kernels.skinny_matmul import fits, skinny_lora_matmul, skinny_matmul
from lora_jax.kernels.swiglu import lora_swiglu, swiglu
from lora_jax.kernels.tiled_expand import LoRASum, lora_add, lora_silu_mul
from lora_jax.kernels.tiled_lora import lora_shrink_tiles

from ..lora.apply import base_product, lora_linear, lora_operands, register_lora_class, row_adapters, tile_adapters
from .config import ModelConfig

Rope = tuple[jax.Array, jax.Array]
"""cos, sin: float32 [T, D / 2]."""


class StepInputs(Protocol):
    """What a phase gives to every layer: how its tokens attend, the implementation ("triton" or "xla") of its kernels, and the
    items of `SlotRanks`: None where no adapter is active."""

    @property
    def implementation(self) -> str: ...

    @property
    def items(self) -> jax.Array | None: ...

    def attend(
        self,
        qkv: jax.Array | LoRASum,
        rope: Rope,
        kv: jax.Array,
        *,
        arrivals: jax.Array | None,
        heads: int,
        window: int | None,
        norms: HeadNorms | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """qkv [T, (H + 2K) * D], or partial sums [S, ...] of it, or its adapters still to be added -> (heads' outputs [T, H * D],
        kv pages with the tokens, arrivals)."""
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
    def start(cls, x: jax.Array, norm: RMSNorm, config: ModelConfig, inputs: StepInputs) -> Stream:
        x, normed = norm.add(x, None, inputs.implementation)
        if inputs.implementation != "triton":
            return cls(x, normed, None)
        pieces = max(x.shape[1] // 64, x.shape[0] * config.num_kv_heads)  # of a residual product, of an attention
        if inputs.items is not None:
            tiled = inputs.items.ndim == 3
            of_items = inputs.items.shape[1] if tiled else adapter_counters(inputs.items, config.num_layers)
            pieces = max(pieces, of_items) if tiled else pieces + of_items
        return cls(x, normed, new_arrivals(pieces))


def array(x: Normed) -> jax.Array:
    return x.normed() if isinstance(x, DeferredNorm) else x


class _Weights(NamedTuple):
    kernel: jax.Array
    adapters: Adapters | None


def _weights(linear: nnx.Linear, rows: int, inputs: StepInputs) -> _Weights | None:
    """For a kernel of ours in the linear's place; None: the linear computes by itself, with its bias, or with adapters where
    the kernels do not take them."""
    if inputs.implementation != "triton" or linear.bias is not None:
        return None
    if type(linear) is nnx.Linear:
        return _Weights(linear.kernel[...], None)
    adapters = row_adapters(linear, rows, inputs.items)
    return None if adapters is None else _Weights(linear.kernel[...], adapters)


def _tiled(
    linear: nnx.Linear, x: Normed, arrivals: jax.Array | None, inputs: StepInputs
) -> tuple[LoRASum, jax.Array] | None:
    """(linear(x) [T, out] as a product, bias and all, and what its adapters add, for a kernel that adds what it reads; arrivals).
    None: not with few rows, and where the kernels do not take such adapters."""
    adapters = tile_adapters(linear, inputs.items) if inputs.implementation == "triton" else None
    if adapters is None:
        return None
    assert arrivals is not None
    x = array(x)
    h, after = lora_shrink_tiles(x, adapters, arrivals)
    return LoRASum(base_product(linear, x), h, adapters), after


def _product(
    linear: nnx.Linear, x: Normed, arrivals: jax.Array | None, inputs: StepInputs
) -> tuple[jax.Array | LoRASum, jax.Array | None]:
    """(linear(x) [T, out], for a kernel that sums what it reads also float32 partial sums [S, T, out] of it or what `_tiled` says;
    arrivals)."""
    tiled = _tiled(linear, x, arrivals, inputs)
    if tiled is not None:
        return tiled
    size, outputs = linear.kernel.shape
    own = _weights(linear, x.shape[0], inputs) if fits(x.shape[0], size, outputs) else None
    if own is None:
        return linear(array(x)), arrivals
    if own.adapters is None:
        return skinny_matmul(x, own.kernel), arrivals
    return skinny_lora_matmul(x, own.kernel, own.adapters, arrivals)


def project(stream: Stream, linear: nnx.Linear, inputs: StepInputs) -> tuple[Stream, jax.Array | LoRASum]:
    """The stream's norm through the linear: [T, out], with many rows its adapters left to be added, or with few rows float32
    partial sums [S, T, out] of it."""
    out, arrivals = _product(linear, stream.normed, stream.arrivals, inputs)
    return stream._replace(arrivals=arrivals), out


def activate(stream: Stream, linear: nnx.Linear, inputs: StepInputs) -> tuple[Stream, jax.Array]:
    """silu(gate(x)) * up(x) [T, F] of the stream's norm x and a linear that gives gate and up side by side."""
    tiled = _tiled(linear, stream.normed, stream.arrivals, inputs)
    if tiled is not None:
        return stream._replace(arrivals=tiled[1]), lora_silu_mul(*tiled[0])
    x, (size, outputs) = stream.normed, linear.kernel.shape
    own = _weights(linear, x.shape[0], inputs) if fits(x.shape[0], size, outputs // 2) else None
    if own is None:
        gate, up = jnp.split(linear(array(x)), 2, -1)
        return stream, nnx.silu(gate) * up
    if own.adapters is None:
        return stream, swiglu(x, own.kernel)
    out, arrivals = lora_swiglu(x, own.kernel, own.adapters, stream.arrivals)
    return stream._replace(arrivals=arrivals), out


def add(stream: Stream, linear: nnx.Linear, y: jax.Array, norm: RMSNorm, inputs: StepInputs) -> Stream:
    """The stream with linear(y) added to it, and its norm: as one kernel with few rows."""
    (size, outputs), rows = linear.kernel.shape, y.shape[0]
    own = _weights(linear, rows, inputs) if fits_residual(rows, size, outputs, linear.kernel.dtype) else None
    if own is not None:
        given = y, own.kernel, stream.x, norm.scale[...], stream.arrivals
        return Stream(*residual_matmul(*given, eps=norm.eps, adapters=own.adapters))
    out, arrivals = _product(linear, y, stream.arrivals, inputs)
    if isinstance(out, LoRASum):
        out = lora_add(*out)
    return Stream(*norm.add(stream.x, out, inputs.implementation), arrivals)


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
        stream, qkv = project(stream, self.qkv_proj, inputs)
        out, kv, arrivals = inputs.attend(
            qkv,
            rope,
            kv,
            arrivals=stream.arrivals,
            heads=self.heads,
            window=self.window,
            norms=norms,
        )
        return add(stream._replace(arrivals=arrivals), self.o_proj, out, following, inputs), kv


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) with gate and up fused (Shazeer, "GLU variants improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        kw: dict[str, Any] = dict(use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.gate_up_proj = nnx.Linear(config.hidden_size, 2 * config.intermediate_size, **kw)
        self.down_proj = nnx.Linear(config.intermediate_size, config.hidden_size, **kw)

    def __call__(self, stream: Stream, following: RMSNorm, inputs: StepInputs) -> Stream:
        stream, y = activate(stream, self.gate_up_proj, inputs)
        return add(stream, self.down_proj, y, following, inputs)


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
        return self.mlp(stream, following, inputs), kv
