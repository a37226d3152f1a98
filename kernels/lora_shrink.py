"""LoRA shrink: h = x @ A[layer, slot]^T, each row with its own adapter, as split-K partial sums.

T tokens, K inputs, L layers, S slots, C = n*R rank rows of all slices, P split-K parts (a function of the shapes).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .in_kernel import dot
from .tuning import ShrinkTiles, shrink_tiles


# ---- 1. the public op ------------------------------------------------------------------------------------------------
def lora_shrink(
    x: jax.Array,
    a: jax.Array,
    slot_ids: jax.Array,
    layer: jax.Array,
    *,
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """Each row times the A of its own adapter.

    x [T, K] bfloat16, float16 or float32; a [L, S, C, K] of the same dtype, C = slices * padded rank;
    slot_ids [T] int32 in [-1, S), -1 = no adapter; layer int32 scalar, an operand of the program and never static.
    Returns h [P, T, C] float32, to be summed over P (lora_expand does); rows of slot -1 are zeros.
    A row's bits depend on its own x and weights alone, for given shapes. interpret: run the Triton form on any backend.

    Raises: ValueError naming the operand.
    """
    layout.check_implementation("lora_shrink", implementation)
    if x.ndim != 2 or a.ndim != 4 or x.shape[1] != a.shape[3] or 0 in x.shape or 0 in a.shape:
        raise ValueError(f"lora_shrink: needs x [T, K] and a [L, S, C, K], got {list(x.shape)} and {list(a.shape)}")
    layout.check_dtype("lora_shrink", "x", x.dtype)
    if a.dtype != x.dtype:
        raise ValueError(f"lora_shrink: a must have the dtype of x ({x.dtype}), got {a.dtype}")
    layer = layout.check_rows("lora_shrink", x.shape[0], slot_ids, layer)
    if implementation == "xla":
        return _xla(x, a, slot_ids, layer)
    return _triton(x, a, slot_ids, layer, interpret=interpret)


# ---- 2. the kernels --------------------------------------------------------------------------------------------------
def _load_k(ref, index, k, tiles: ShrinkTiles, size: int):
    """ref[*index, k : k + block_k], zeros beyond the end."""
    at = ref.at[*index, pl.ds(k, tiles.block_k)]
    if size % (tiles.block_k * tiles.steps) == 0:
        return at[...]
    inside = k + lax.iota(jnp.int32, tiles.block_k) < size
    return plgpu.load(at, mask=jnp.broadcast_to(inside, at.shape), other=0)


def _loop(steps: int, body, init):
    return body(0, init) if steps == 1 else lax.fori_loop(0, steps, body, init)


def _one_row(
    slots,  # [T] int32
    layer,  # [1] int32
    x,  # [T, K]
    a,  # [L, S, C, K]
    h,  # [P, T, C] float32, out
    *,
    tiles: ShrinkTiles,
):
    """Program (row, part, rank block): one row over its part of K. For few rows, where bandwidth is all that counts."""
    row, part, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    slot, lay, size = slots[row], layer[0], x.shape[1]
    ranks = pl.ds(block * tiles.block_c, tiles.block_c)

    @pl.when(slot < 0)
    def _():
        h[part, row, ranks] = jnp.zeros((tiles.block_c,), jnp.float32)

    @pl.when(slot >= 0)
    def _():
        def body(step, acc):
            k = (part * tiles.steps + step) * tiles.block_k
            x_k = _load_k(x, (row,), k, tiles, size).astype(jnp.float32)
            a_ck = _load_k(a, (lay, slot, ranks), k, tiles, size).astype(jnp.float32)
            return acc + a_ck * x_k[None, :]

        acc = _loop(tiles.steps, body, jnp.zeros((tiles.block_c, tiles.block_k), jnp.float32))
        h[part, row, ranks] = jnp.sum(acc, axis=1)


def _many_rows(
    slots,  # [T] int32
    layer,  # [1] int32
    x,  # [T, K]
    a,  # [L, S, C, K]
    h,  # [P, T, C] float32, out
    *,
    tiles: ShrinkTiles,
):
    """Program (row tile, part, rank block): for each distinct slot of the tile one product of the whole tile, of which
    only that slot's rows are stored. So a row's bits cannot depend on its neighbours' slots."""
    tile, part, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (rows, size), slot_count = x.shape, a.shape[1]
    width = max(tiles.block_c, 16)  # the least that a tensor-core product takes; the surplus is masked
    first, rank0 = tile * tiles.block_t, block * tiles.block_c
    t = first + lax.iota(jnp.int32, tiles.block_t)
    in_rank = lax.iota(jnp.int32, width) < tiles.block_c
    t_slice = pl.ds(first, tiles.block_t)
    ids = plgpu.load(slots.at[t_slice], mask=t < rows, other=-1)
    out = h.at[part, t_slice, pl.ds(rank0, width)]
    masked_k = size % (tiles.block_k * tiles.steps) != 0

    def store(value_tc, where_t):
        plgpu.store(out, value_tc, mask=where_t[:, None] & in_rank[None, :])

    store(jnp.zeros((tiles.block_t, width), jnp.float32), (t < rows) & (ids < 0))

    def following(slot):
        return jnp.min(jnp.where(ids > slot, ids, slot_count))

    def for_slot(slot):
        def body(step, acc):
            k = (part * tiles.steps + step) * tiles.block_k
            in_k = (k + lax.iota(jnp.int32, tiles.block_k) < size) if masked_k else jnp.full((tiles.block_k,), True)
            k_slice = pl.ds(k, tiles.block_k)
            x_tk = plgpu.load(x.at[t_slice, k_slice], mask=(t < rows)[:, None] & in_k[None, :], other=0)
            at = a.at[layer[0], slot, pl.ds(rank0, width), k_slice]
            a_ck = plgpu.load(at, mask=in_rank[:, None] & in_k[None, :], other=0)
            return acc + dot(x_tk, a_ck.T)

        acc = _loop(tiles.steps, body, jnp.zeros((tiles.block_t, width), jnp.float32))
        store(acc, ids == slot)
        return following(slot)

    lax.while_loop(lambda slot: slot < slot_count, for_slot, following(jnp.int32(-1)))


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(x: jax.Array, a: jax.Array, slot_ids: jax.Array, layer: jax.Array, *, interpret: bool) -> jax.Array:
    rows, size = x.shape
    ranks = a.shape[2]
    tiles = shrink_tiles(rows, size, ranks, x.dtype.itemsize)
    kernel = _one_row if tiles.block_t == 1 else _many_rows
    return pl.pallas_call(
        functools.partial(kernel, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((tiles.parts, rows, ranks), jnp.float32),
        grid=(layout.cdiv(rows, tiles.block_t), tiles.parts, ranks // tiles.block_c),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name=f"lora_shrink{kernel.__name__}",
        interpret=interpret,
    )(slot_ids, layer.reshape(1), x, a)


# ---- 4. the plain-JAX form -------------------------------------------------------------------------------------------
def _xla(x: jax.Array, a: jax.Array, slot_ids: jax.Array, layer: jax.Array) -> jax.Array:
    if layout.gathers(x.shape[0], a):
        h = jnp.einsum("tk,tck->tc", x, layout.gather_rows(a, slot_ids, layer), preferred_element_type=jnp.float32)
        return jnp.where((slot_ids >= 0)[:, None], h, 0.0)[None]

    def product(a_ck):
        return jnp.einsum("tk,ck->tc", x, a_ck, preferred_element_type=jnp.float32)

    zeros = jnp.zeros((x.shape[0], a.shape[2]), jnp.float32)
    return layout.for_each_slot(slot_ids, a, layer, product, zeros)[None]
