"""LoRA expand: y += h @ B[layer, slot], each row with its own adapter, each output slice with its own rank rows.

T tokens, N outputs, L layers, S slots, R padded rank, n slices, P split-K parts of the shrink.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .in_kernel import pick
from .tuning import ExpandTiles, expand_tiles


# ---- 1. the public op ------------------------------------------------------------------------------------------------
def lora_expand(
    y: jax.Array,
    h: jax.Array,
    b: jax.Array,
    slot_ids: jax.Array,
    layer: jax.Array,
    *,
    slices: tuple[int, ...],
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """Adds each row's LoRA delta to y: round(float32(y) + sum_P(h) @ B), in place where y is not used again.

    y [T, N] bfloat16, float16 or float32; h [P, T, n*R] float32 from lora_shrink; b [L, S, R, N] of one of these dtypes,
    R a power of two up to 256; slices: widths of the n output slices, their sum is N; slot_ids [T] int32 in [-1, S),
    -1 = no adapter; layer int32 scalar, an operand of the program and never static.
    Returns [T, N] of y's dtype; rows of slot -1 are those of y bit for bit. A row's bits depend on its own y, h and
    weights alone, for given shapes. interpret: run the Triton form on any backend.

    Raises: ValueError naming the operand.
    """
    layout.check_implementation("lora_expand", implementation)
    if y.ndim != 2 or b.ndim != 4 or y.shape[1] != b.shape[3] or 0 in y.shape or 0 in b.shape:
        raise ValueError(f"lora_expand: needs y [T, N] and b [L, S, R, N], got {list(y.shape)} and {list(b.shape)}")
    rank = b.shape[2]
    if rank & (rank - 1) or rank > layout.MAX_RANK:
        raise ValueError(f"lora_expand: the rank of b must be a power of two up to {layout.MAX_RANK}, got {rank}")
    if min(slices, default=0) < 1 or sum(slices) != y.shape[1]:
        raise ValueError(f"lora_expand: slices {slices} must be positive and add up to N = {y.shape[1]}")
    if h.ndim != 3 or h.shape[1:] != (y.shape[0], len(slices) * rank) or h.dtype != jnp.float32:
        want = f"float32 [P, {y.shape[0]}, {len(slices)} * {rank}]"
        raise ValueError(f"lora_expand: h must be {want}, got {h.dtype} {list(h.shape)}")
    layout.check_dtype("lora_expand", "y", y.dtype)
    layout.check_dtype("lora_expand", "b", b.dtype)
    layer = layout.check_rows("lora_expand", y.shape[0], slot_ids, layer)
    if implementation == "xla":
        return _xla(y, h, b, slot_ids, layer, slices)
    return _triton(y, h, b, slot_ids, layer, slices, interpret=interpret)


# ---- 2. the kernels --------------------------------------------------------------------------------------------------
def _locate(tile, slices: tuple[int, ...], width: int):
    """Column tile -> (slice, its first column, the end of that slice). No tile reaches over a slice's end."""
    index, column, end, first_tile = jnp.int32(0), tile * width, jnp.int32(slices[0]), 0
    for i, (offset, size) in enumerate(zip(layout.slice_offsets(slices), slices, strict=True)):
        if i:
            here = tile >= first_tile
            index = jnp.where(here, i, index)
            column = jnp.where(here, offset + (tile - first_tile) * width, column)
            end = jnp.where(here, offset + size, end)
        first_tile += layout.cdiv(size, width)
    return index, pl.multiple_of(column, math.gcd(width, *layout.slice_offsets(slices))), end


def _one_row(
    slots,  # [T] int32
    layer,  # [1] int32
    h,  # [P, T, n*R] float32
    b,  # [L, S, R, N]
    _,  # y [T, N], the same memory as out
    out,  # [T, N], holds y at first
    *,
    slices: tuple[int, ...],
    tiles: ExpandTiles,
):
    """Program (`turns` rows one after the other, column tile). For few rows, where bandwidth is all that counts."""
    first, tile, lay = pl.program_id(0) * tiles.turns, pl.program_id(1), layer[0]
    parts, rank = h.shape[0], b.shape[2]
    ragged = any(size % tiles.block_n for size in slices)
    padded_parts = 1 << (parts - 1).bit_length()
    in_parts = jnp.broadcast_to((lax.iota(jnp.int32, padded_parts) < parts)[:, None], (padded_parts, tiles.block_r))
    turns = lax.iota(jnp.int32, tiles.turns)
    own = plgpu.load(slots.at[first + turns], mask=first + turns < slots.shape[0], other=-1)  # in one load

    def turn(i, _):
        row, slot = first + i, pick(own, i)

        @pl.when(slot >= 0)
        def _():
            index, column, end = _locate(tile, slices, tiles.block_n)
            columns = pl.ds(column, tiles.block_n)
            in_n = column + lax.iota(jnp.int32, tiles.block_n) < end if ragged else None
            # Loaded before the sums, which wait: a program's time is that of its loads, one after the other.
            y_n = plgpu.load(out.at[row, columns], mask=in_n, other=None if in_n is None else 0)
            delta = jnp.zeros((tiles.block_n,), jnp.float32)
            for r in range(0, rank, tiles.block_r):
                b_at = b.at[lay, slot, pl.ds(r, tiles.block_r), columns]
                b_mask = None if in_n is None else jnp.broadcast_to(in_n[None, :], (tiles.block_r, tiles.block_n))
                b_rn = plgpu.load(b_at, mask=b_mask, other=None if in_n is None else 0)
                h_at = h.at[pl.ds(0, padded_parts), row, pl.ds(index * rank + r, tiles.block_r)]
                h_pr = h_at[...] if parts == padded_parts else plgpu.load(h_at, mask=in_parts, other=0.0)
                delta += jnp.sum(b_rn.astype(jnp.float32) * jnp.sum(h_pr, axis=0)[:, None], axis=0)
            plgpu.store(out.at[row, columns], (y_n.astype(jnp.float32) + delta).astype(out.dtype), mask=in_n)

        return 0

    lax.fori_loop(0, tiles.turns, turn, 0)


def _many_rows(
    slots,  # [T] int32
    layer,  # [1] int32
    h,  # [P, T, n*R] float32
    b,  # [L, S, R, N]
    _,  # y [T, N], the same memory as out
    out,  # [T, N], holds y at first
    *,
    slices: tuple[int, ...],
    tiles: ExpandTiles,
):
    """Program (row tile, column tile): for each distinct slot of the tile one product of the whole tile, of which only
    that slot's rows are stored. So a row's bits cannot depend on its neighbours' slots."""
    (parts, rows, _), (_, slot_count, rank, _) = h.shape, b.shape
    first = pl.program_id(0) * tiles.block_t
    index, column, end = _locate(pl.program_id(1), slices, tiles.block_n)
    columns, t_slice = pl.ds(column, tiles.block_n), pl.ds(first, tiles.block_t)
    t = first + lax.iota(jnp.int32, tiles.block_t)
    in_n = column + lax.iota(jnp.int32, tiles.block_n) < end
    ids = plgpu.load(slots.at[t_slice], mask=t < rows, other=-1)
    width = max(tiles.block_r, 16)  # the least that a tensor-core product takes; the surplus is masked
    in_rank = lax.iota(jnp.int32, width) < tiles.block_r
    # TF32 holds every bfloat16 and float16 value of B, and three more bits of h than a bfloat16 product would.
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.HIGH

    def following(slot):
        return jnp.min(jnp.where(ids > slot, ids, slot_count))

    def for_slot(slot):
        own = ids == slot

        def product(step, acc):
            r = step * tiles.block_r
            h_mask = own[:, None] & in_rank[None, :]
            h_tr = jnp.zeros((tiles.block_t, width), jnp.float32)
            for part in range(parts):  # few, and unrolled so that all loads are in flight at once
                at = h.at[pl.ds(part, 1), t_slice, pl.ds(index * rank + r, width)]
                h_tr += plgpu.load(at, mask=h_mask[None], other=0.0).reshape(tiles.block_t, width)
            b_at = b.at[layer[0], slot, pl.ds(r, width), columns]
            b_rn = plgpu.load(b_at, mask=in_rank[:, None] & in_n[None, :], other=0).astype(jnp.float32)
            return acc + jnp.dot(h_tr, b_rn, precision=precision, preferred_element_type=jnp.float32)

        delta = lax.fori_loop(0, rank // tiles.block_r, product, jnp.zeros((tiles.block_t, tiles.block_n), jnp.float32))
        mask = own[:, None] & in_n[None, :]
        y_tn = plgpu.load(out.at[t_slice, columns], mask=mask, other=0)
        plgpu.store(out.at[t_slice, columns], (y_tn.astype(jnp.float32) + delta).astype(out.dtype), mask=mask)
        return following(slot)

    lax.while_loop(lambda slot: slot < slot_count, for_slot, following(jnp.int32(-1)))


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(y, h, b, slot_ids, layer, slices: tuple[int, ...], *, interpret: bool) -> jax.Array:
    rows, rank = y.shape[0], b.shape[2]
    tiles = expand_tiles(rows, slices, rank, b.dtype.itemsize)
    kernel = _one_row if tiles.block_t == 1 else _many_rows
    return pl.pallas_call(
        functools.partial(kernel, slices=slices, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(layout.cdiv(rows, tiles.block_t * tiles.turns), sum(layout.cdiv(size, tiles.block_n) for size in slices)),
        input_output_aliases={4: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name=f"lora_expand{kernel.__name__}",
        interpret=interpret,
    )(slot_ids, layer.reshape(1), h, b, y)


# ---- 4. the plain-JAX form -------------------------------------------------------------------------------------------
def _xla(y, h, b, slot_ids, layer, slices: tuple[int, ...]) -> jax.Array:
    rank = b.shape[2]
    h_tc = jnp.sum(h, axis=0)
    offsets = layout.slice_offsets(slices)

    def by_slice(product) -> jax.Array:
        parts = [product(h_tc[:, i * rank : (i + 1) * rank], at, at + slices[i]) for i, at in enumerate(offsets)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    if layout.gathers(y.shape[0], b):
        b_trn = layout.gather_rows(b, slot_ids, layer)
        delta = by_slice(lambda h_tr, lo, hi: _product("tr,trn->tn", h_tr, b_trn[:, :, lo:hi]))
    else:
        delta = layout.for_each_slot(
            slot_ids,
            b,
            layer,
            lambda b_rn: by_slice(lambda h_tr, lo, hi: _product("tr,rn->tn", h_tr, b_rn[:, lo:hi])),
            jnp.zeros(y.shape, jnp.float32),
        )
    return jnp.where((slot_ids >= 0)[:, None], (y.astype(jnp.float32) + delta).astype(y.dtype), y)


def _product(spec: str, h: jax.Array, b: jax.Array) -> jax.Array:
    """In float32: the partial sums keep their precision whatever the dtype of the weights."""
    return jnp.einsum(spec, h, b.astype(jnp.float32), preferred_element_type=jnp.float32)
