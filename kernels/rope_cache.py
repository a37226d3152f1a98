"""From the fused q, k, v projection to rotated queries and a cache that holds the new keys and values.

Letters: T tokens, H query heads, K key/value heads, D head size, S partial sums. Queries and keys are rotated as halves, as in
Hugging Face models. Source: Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .add_norm import rms_norm
from .in_kernel import full, positions
from .tiled_expand import Static, check_sum, lora_add, operands, tile_deltas
from .tiled_lora import TileAdapters
from .tuning import ExpandCut, expand_cut

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


@functools.partial(jax.jit, static_argnames=("heads", "cut", "implementation", "interpret"))
def lora_rope_to_cache(
    qkv: jax.Array,
    h: jax.Array,
    adapters: TileAdapters,
    rope: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    index: jax.Array,
    *,
    heads: int,
    norms: HeadNorms | None = None,
    cut: ExpandCut | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`rope_to_cache` of `lora_add(qkv, h, adapters)`, in one pass over qkv [T, (H + 2K) * D].

    h: of `lora_shrink_tiles`; slices of adapters: (H * D, K * D, K * D), D as `lora_rope_fits` says; cut: its block_n is not used.
    Raises: ValueError naming the operand.
    """
    op = "lora_rope_to_cache"
    check_heads(op, qkv, rope, kv, heads, norms)
    if index.shape != qkv.shape[:1] or index.dtype != jnp.int32:
        raise ValueError(f"{op}: index must be int32 [{qkv.shape[0]}], got {index.dtype} {index.shape}")
    check_sum(op, qkv, h, adapters, implementation)
    kv_heads, size = kv.shape[3:]
    if adapters.slices != (heads * size, kv_heads * size, kv_heads * size):
        raise ValueError(f"{op}: slices must be those of q, k and v, got {adapters.slices}")
    if implementation == "xla" or not lora_rope_fits(size):
        how: dict[str, Any] = dict(implementation=implementation, interpret=interpret)
        return rope_to_cache(lora_add(qkv, h, adapters, **how), rope, kv, index, heads=heads, norms=norms, **how)
    cut = cut or expand_cut((size,), adapters.block_t)
    return _triton_lora(qkv, h, adapters, rope, kv, index, heads, norms, cut, interpret)


def lora_rope_fits(size: int) -> bool:
    """Whether one kernel takes heads of this size: tensor cores take half a head."""
    return size >= 32 and size & (size - 1) == 0


def check_heads(
    op: str, qkv: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array, heads: int, norms: HeadNorms | None
) -> None:
    """Raises ValueError naming the operand whose shape or dtype does not fit."""
    layout.check_dtype(op, "kv", kv.dtype)
    if kv.ndim != 5 or kv.shape[2] != 2 or kv.shape[4] % 2 or not 0 < kv.shape[3] <= heads or heads % kv.shape[3]:
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


def _lora_kernel(*refs, heads: int, eps: float | None, static: Static):
    """Program (head of H + 2K, row tile): both halves of the head.

    refs: what `tile_deltas` reads, then those of `_kernel`."""
    deltas_of, (qkv, cos, sin, _, index) = refs[:4], refs[4:9]
    queries, kv = refs[-2:]
    head, tile = pl.program_id(0), pl.program_id(1)
    tokens, (page_size, _, kv_heads, size) = qkv.shape[0], kv.shape[1:]
    shape = (static.block_t, size // 2)
    row, low = positions(shape)
    t, dims = tile * static.block_t + row, (low, low + size // 2)
    inside = None if tokens % static.block_t == 0 else t < tokens
    of = lambda ref, *at: plgpu.load(ref.at[at], mask=inside, other=None if inside is None else 0)  # noqa: E731
    loaded = [of(qkv, t, head * size + d) for d in dims]
    starts = tuple(head * size + half * (size // 2) for half in range(2))
    deltas = tile_deltas(deltas_of, tile, starts, size // 2, static, one_slice=True)
    halves = [(y.astype(jnp.float32) + delta).astype(kv.dtype) for y, delta in zip(loaded, deltas, strict=True)]

    def rotated(norm):
        x = halves
        if norm is not None:
            x32 = [v.astype(jnp.float32) for v in x]
            squares = sum(jnp.sum(v * v, axis=1, keepdims=True) for v in x32)
            inverse = lax.rsqrt(squares / size + eps)
            x = [(v * inverse).astype(kv.dtype) * plgpu.load(norm.at[d]) for v, d in zip(x32, dims, strict=True)]
        x1, x2 = (v.astype(jnp.float32) for v in x)
        c, s = of(cos, t, low), of(sin, t, low)
        return (x1 * c - x2 * s).astype(kv.dtype), (x2 * c + x1 * s).astype(kv.dtype)

    def to_cache(values, part: int, first: int):
        at = of(index, t)
        place = (lax.div(at, page_size), lax.rem(at, page_size), full(part, shape), full(head - first, shape))
        for d, value in zip(dims, values, strict=True):
            plgpu.store(kv.at[*place, d], value, mask=inside)

    q_norm, k_norm = refs[9:11] if eps is not None else (None, None)

    @pl.when(head < heads)
    def _():
        for d, value in zip(dims, rotated(q_norm), strict=True):
            plgpu.store(queries.at[t, full(head, shape), d], value, mask=inside)

    @pl.when((head >= heads) & (head < heads + kv_heads))
    def _():
        to_cache(rotated(k_norm), 0, heads)

    @pl.when(head >= heads + kv_heads)
    def _():
        to_cache(halves, 1, heads + kv_heads)


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


def _triton_lora(qkv, h, adapters: TileAdapters, rope, kv, index, heads: int, norms, cut: ExpandCut, interpret: bool):
    tokens, (kv_heads, size) = qkv.shape[0], kv.shape[3:]
    eps = None if norms is None else norms.eps
    return pl.pallas_call(
        functools.partial(_lora_kernel, heads=heads, eps=eps, static=Static.of(adapters)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, size), kv.dtype),
            jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        ),
        grid=(heads + 2 * kv_heads, adapters.tiles),
        input_output_aliases={7: 1},
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        name="lora_rope_to_cache",
        interpret=interpret,
    )(*operands(h, adapters), qkv, *rope, kv, index, *(() if norms is None else (norms.q, norms.k)))


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
