"""From the fused q, k, v projection to rotated queries and a cache that holds the new keys and values.

Letters: T tokens, H query heads, K key/value heads, D head size, S partial sums. Queries and keys are rotated as halves, as in
Hugging Face models. Source: Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .add_norm import rms_norm

TILE_TOKENS = 8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q", "k"], meta_fields=["eps"])
@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of each query and key head before rotation (Qwen3): scales [D] of the model's dtype."""

    q: jax.Array
    k: jax.Array
    eps: float


# ---- 1. the public op ------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("heads", "implementation", "interpret"))
def rope_to_cache(
    qkv: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    index: jax.Array,
    *,
    heads: int,
    norms: HeadNorms | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(rotated queries [T, H, D], kv with the keys and values at `index`).

    qkv [T, (H + 2K) * D] of kv's dtype, or float32 partial sums [S, T, (H + 2K) * D] of it; rope: cos and sin, float32
    [T, D / 2]; kv [pages, page_size, 2, K, D], donated by the caller or copied; index int32 [T] = page * page_size + offset.
    Raises: ValueError naming the operand.
    """
    layout.check_implementation("rope_to_cache", implementation)
    check_heads("rope_to_cache", qkv, rope, kv, heads, norms)
    if index.shape != qkv.shape[-2:-1] or index.dtype != jnp.int32:
        raise ValueError(f"rope_to_cache: index must be int32 [{qkv.shape[-2]}], got {index.dtype} {index.shape}")
    if qkv.ndim == 3:
        qkv = jnp.sum(qkv, axis=0).astype(kv.dtype)
    if implementation == "xla":
        q, k, v = rotate_heads(*split_heads(qkv, kv, heads), rope, norms)
        return q, write_tokens(kv, k, v, index)
    return _triton(qkv, rope, kv, index, heads=heads, norms=norms, interpret=interpret)


def check_heads(
    op: str, qkv: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array, heads: int, norms: HeadNorms | None
) -> None:
    """Raises ValueError naming the operand whose shape or dtype does not fit."""
    if kv.ndim != 5 or kv.shape[2] != 2 or kv.shape[4] % 2 or heads % kv.shape[3]:
        raise ValueError(f"{op}: needs kv [pages, page_size, 2, K, D], D even, K a divisor of {heads}, got {kv.shape}")
    columns = (heads + 2 * kv.shape[3]) * kv.shape[4]
    if qkv.ndim not in (2, 3) or qkv.shape[-1] != columns:
        raise ValueError(f"{op}: qkv must have {columns} columns, got {qkv.shape}")
    if qkv.dtype != (kv.dtype if qkv.ndim == 2 else jnp.float32):
        raise ValueError(
            f"{op}: qkv must have the dtype of kv ({kv.dtype}), or be float32 partial sums, got {qkv.dtype}"
        )
    for name, x in zip(("cos", "sin"), rope, strict=True):
        if x.shape != (qkv.shape[-2], kv.shape[4] // 2) or x.dtype != jnp.float32:
            raise ValueError(
                f"{op}: {name} must be float32 [{qkv.shape[-2]}, {kv.shape[4] // 2}], got {x.dtype} {x.shape}"
            )
    for name, x in () if norms is None else (("q", norms.q), ("k", norms.k)):
        if x.shape != kv.shape[4:] or x.dtype != kv.dtype:
            raise ValueError(f"{op}: norms.{name} must be {kv.dtype} [{kv.shape[4]}], got {x.dtype} {x.shape}")


Dims = Callable[[jax.Array], jax.Array]
"""From dimensions of a head, int32 [n, D padded], to what a table holds there."""


def rotate(x, other, d, partner, size: int, cos: Dims, sin: Dims, norm: Dims | None, eps: float) -> jax.Array:
    """Inside kernels: x [n, D padded], one head a row, normed and rotated; other: its values at `partner`, the other half's
    dimensions. norm: scale of the RMSNorm of each head, or None. Each step rounds to x's dtype, as in transformers."""
    if norm is not None:
        x32 = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.sum(x32 * x32, axis=1, keepdims=True) / size + eps)
        x, other = (
            (v.astype(jnp.float32) * inverse).astype(v.dtype) * norm(at) for v, at in ((x, d), (other, partner))
        )
    angle = jnp.minimum(d, partner)
    s = sin(angle)
    turned = x.astype(jnp.float32) * cos(angle) + other.astype(jnp.float32) * jnp.where(d < partner, -s, s)
    return turned.astype(x.dtype)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(*refs, heads: int, eps: float | None):
    """Program (tile of tokens, head of H + 2K). refs: qkv [T, C], cos and sin [T, D/2], kv, index [T], with eps also the scales
    of q's and k's norm [D]; then queries [T, H, D] and kv again, the same memory."""
    qkv, cos, sin, _, index = refs[:5]
    queries, kv = refs[-2:]
    tile, head = pl.program_id(0), pl.program_id(1)
    tokens, (page_size, _, kv_heads, size) = qkv.shape[0], kv.shape[1:]
    shape = (TILE_TOKENS, 1 << (size - 1).bit_length())
    t = lax.broadcasted_iota(jnp.int32, shape, 0) + tile * TILE_TOKENS
    d = lax.broadcasted_iota(jnp.int32, shape, 1)
    partner = jnp.where(d < size // 2, d + size // 2, d - size // 2)
    inside = (t < tokens) & (d < size)
    load = lambda column: plgpu.load(qkv.at[t, head * size + column], mask=inside, other=0)  # noqa: E731
    x = load(d)

    def rotated(norm):
        of = lambda ref, *at: plgpu.load(ref.at[at], mask=inside, other=0)  # noqa: E731
        scale = None if norm is None else lambda dims: of(norm, dims)
        return rotate(
            x, load(partner), d, partner, size, lambda a: of(cos, t, a), lambda a: of(sin, t, a), scale, eps or 0.0
        )

    def to_cache(value, part: int, first: int):
        at = plgpu.load(index.at[t], mask=inside, other=0)
        place = (lax.div(at, page_size), lax.rem(at, page_size), jnp.full(shape, part), jnp.full(shape, head - first))
        plgpu.store(kv.at[*place, d], value, mask=inside)

    q_norm, k_norm = refs[5:7] if eps is not None else (None, None)

    @pl.when(head < heads)
    def _():
        plgpu.store(queries.at[t, jnp.full(shape, head), d], rotated(q_norm), mask=inside)

    @pl.when((head >= heads) & (head < heads + kv_heads))
    def _():
        to_cache(rotated(k_norm), 0, heads)

    @pl.when(head >= heads + kv_heads)
    def _():
        to_cache(x, 1, heads + kv_heads)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(qkv, rope, kv, index, *, heads: int, norms: HeadNorms | None, interpret: bool):
    tokens, (kv_heads, size) = qkv.shape[0], kv.shape[3:]
    return pl.pallas_call(
        functools.partial(_kernel, heads=heads, eps=None if norms is None else norms.eps),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, size), kv.dtype),
            jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        ),
        grid=(pl.cdiv(tokens, TILE_TOKENS), heads + 2 * kv_heads),
        input_output_aliases={3: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="rope_to_cache",
        interpret=interpret,
    )(qkv, *rope, kv, index, *(() if norms is None else (norms.q, norms.k)))


# ---- 4. the plain-JAX form -------------------------------------------------------------------------------------------
def split_heads(qkv: jax.Array, kv: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, H, D], k and v [T, K, D] of kv's dtype."""
    kv_heads, size = kv.shape[3:]
    cuts = (heads * size, (heads + kv_heads) * size)
    q, k, v = (part.reshape(qkv.shape[0], -1, size) for part in jnp.split(qkv, cuts, axis=-1))
    return q, k, v


def _rotated(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = (part[:, None] for part in rope)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)


def rotate_heads(q, k, v, rope, norms: HeadNorms | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    return _rotated(q, rope), _rotated(k, rope), v


def write_tokens(kv: jax.Array, k: jax.Array, v: jax.Array, index: jax.Array) -> jax.Array:
    """kv with tokens' k, v [T, K, D] stored at index int32 [T] = page * page_size + offset."""
    pair = jnp.stack([k, v], 1)
    if index.shape[0] == 1:  # XLA rewrites a scatter of one row into a form that copies the whole cache: write it twice
        index, pair = jnp.repeat(index, 2), jnp.repeat(pair, 2, 0)
    return kv.at[index // kv.shape[1], index % kv.shape[1]].set(pair, mode="promise_in_bounds")
