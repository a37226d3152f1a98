"""What reads a product of many rows next adds its adapters: h @ B, of h as `tiled_lora` leaves it.

`lora_add` does only that; `lora_silu_mul`, and `lora_rope_to_cache` of rope_cache.py, read the product anyway.
Letters as in `tiled_lora`; F outputs of each half of a product.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .in_kernel import dot, full, pick, positions, silu_mul
from .lora_items import ITEM
from .tile_items import b_row_of
from .tiled_lora import TileAdapters, check_tile_adapters, h_shape, items_of, tile_of_items
from .tuning import ExpandCut, expand_cut

LISTED = 32  # items, a warp's lanes


class LoRASum(NamedTuple):
    """y + h @ B [T, N], left to whoever reads it: y the product alone, h of `lora_shrink_tiles`."""

    y: jax.Array
    h: jax.Array
    adapters: TileAdapters


# ---- 1. the public ops -----------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("cut", "implementation", "interpret"))
def lora_add(
    y: jax.Array,
    h: jax.Array,
    adapters: TileAdapters,
    *,
    cut: ExpandCut | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """round(y + h @ B) [T, N] in y's dtype, in place where y is not used again; rows without adapters keep their bits.

    y [T, N] of b's dtype; h: of `lora_shrink_tiles`. Raises: ValueError naming the operand.
    """
    check_sum("lora_add", y, h, adapters, implementation)
    if implementation == "xla":
        return (y.astype(jnp.float32) + _xla_delta(h, adapters)).astype(y.dtype)
    return _triton_add(y, h, adapters, cut or expand_cut(adapters.slices, adapters.block_t), interpret)


@functools.partial(jax.jit, static_argnames=("cut", "implementation", "interpret"))
def lora_silu_mul(
    gate_up: jax.Array,
    h: jax.Array,
    adapters: TileAdapters,
    *,
    cut: ExpandCut | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """silu(gate) * up [T, F] of gate, up = gate_up + h @ B, in gate_up's dtype, to which gate, silu(gate) and up are rounded too.

    gate_up [T, 2F] of b's dtype, slices (F, F); h: of `lora_shrink_tiles`. Raises: ValueError naming the operand.
    """
    check_sum("lora_silu_mul", gate_up, h, adapters, implementation)
    if len(adapters.slices) != 2 or adapters.slices[0] != adapters.slices[1]:
        raise ValueError(f"lora_silu_mul: slices must be (F, F), got {adapters.slices}")
    if implementation == "xla":
        gate, up = jnp.split(gate_up.astype(jnp.float32) + _xla_delta(h, adapters), 2, -1)
        return silu_mul(gate, up, gate_up.dtype)
    return _triton_silu_mul(gate_up, h, adapters, cut or expand_cut(adapters.slices, adapters.block_t), interpret)


def check_sum(op: str, y: jax.Array, h: jax.Array, adapters: TileAdapters, implementation: str) -> None:
    """Raises: ValueError naming the operand."""
    layout.check_implementation(op, implementation)
    if y.ndim != 2 or y.dtype != adapters.b.dtype or y.shape[1] != adapters.b.shape[3]:
        raise ValueError(f"{op}: y must be {adapters.b.dtype} [T, {adapters.b.shape[3]}], got {y.dtype} {y.shape}")
    check_tile_adapters(op, adapters, y.shape[0])
    want = h_shape(adapters)
    if h.shape != want.shape or h.dtype != want.dtype:
        raise ValueError(f"{op}: h must be {want.dtype} {want.shape}, got {h.dtype} {h.shape}")


# ---- 2. in kernels ---------------------------------------------------------------------------------------------------
class Static(NamedTuple):
    """What kernels know of adapters without reading it."""

    slices: tuple[int, ...]
    linear: int
    block_t: int
    tiles: int
    place: int  # Q
    most: int  # items of a tile

    @classmethod
    def of(cls, adapters: TileAdapters) -> Static:
        _, places, place, _ = adapters.b.shape
        slots, pieces = (places, 1) if adapters.places is None else adapters.places.shape
        most = min(adapters.block_t, slots) * layout.cdiv(place * pieces, ITEM)
        return cls(adapters.slices, adapters.linear, adapters.block_t, adapters.tiles, place, most)


def operands(h: jax.Array, adapters: TileAdapters) -> tuple[jax.Array, ...]:
    """What `tile_deltas` reads, in its order."""
    layers, slots, rank, outputs = adapters.b.shape
    return adapters.items, adapters.layer.reshape(1), h, adapters.b.reshape(layers, slots * rank, outputs)


def tile_deltas(
    refs: tuple, tile, starts: tuple, width: int, static: Static, *, one_slice: bool = False
) -> tuple[jax.Array, ...]:
    """float32 [BT, width] of h @ B for the columns from each of `starts` on, which lie in one slice.

    refs: lists [G, J + tiles, ITEM], layer [1], h [n, halves, J, BT, ITEM], b [L, P * Q, N]. one_slice: all starts lie in the
    same. An item a step, high part, then low part: other adapters' items add zeros, so a row's bits do not depend on the tile's
    other rows.
    """
    lists, layer, h, b = refs
    at_slices = [layout.slice_of(start, static.slices) for start in (starts[:1] if one_slice else starts)]
    begin, count = items_of(lists, static.linear, tile, static.tiles)

    def h_of(at_slice, item) -> list[jax.Array]:
        t, k = positions((static.block_t, ITEM))
        at = lambda q: (full(at_slice, t.shape), full(q, t.shape), full(item, t.shape), t, k)  # noqa: E731
        return [plgpu.load(h.at[at(q)]) for q in range(h.shape[1])]

    lane = lax.iota(jnp.int32, min(LISTED, max(1, 1 << (static.most - 1).bit_length())))

    def some(window, sums):
        """As many items as lanes, their rows of B in a register."""
        first = window * lane.shape[0]
        at = (full(static.linear, lane.shape), begin + first + lane, full(0, lane.shape))
        listed = b_row_of(plgpu.load(lists.at[at], mask=first + lane < count, other=0))

        def body(i, sums):
            r, c = positions((ITEM, width))
            b_row = pick(listed, i) + jnp.minimum(r, static.place - 1)  # where the item has fewer ranks h is zero
            h_tr = [h_of(at_slice, begin + first + i) for at_slice in at_slices] * (len(starts) // len(at_slices))
            out = []
            for total, start, halves in zip(sums, starts, h_tr, strict=True):
                b_rn = plgpu.load(b.at[full(layer[0], r.shape), b_row, start + c])
                for half in halves:
                    total = total + dot(half, b_rn)
                out.append(total)
            return tuple(out)

        return lax.fori_loop(0, jnp.minimum(count - first, lane.shape[0]), body, sums)

    zeros = tuple(jnp.zeros((static.block_t, width), jnp.float32) for _ in starts)
    if static.most <= lane.shape[0]:
        return some(0, zeros)
    return lax.fori_loop(0, pl.cdiv(count, lane.shape[0]), some, zeros)


def _place(cut: ExpandCut, static: Static, tokens: int) -> tuple[Any, ...]:
    """Of program (column tile, row tile): its first column, its tile, rows and columns [BT, block_n], a mask or None."""
    start, tile = pl.program_id(0) * cut.block_n, pl.program_id(1)
    row, column = positions((static.block_t, cut.block_n), start)
    t = tile * static.block_t + row
    return start, tile, t, column, None if tokens % static.block_t == 0 else t < tokens


def _add_kernel(
    lists,  # [G, J + tiles, ITEM] int32
    layer,  # [1] int32
    h,  # [n, halves, J, BT, ITEM]
    b,  # [L, P * Q, N]
    _,  # y [T, N], the same memory as out
    out,  # [T, N], holds y at first
    *,
    cut: ExpandCut,
    static: Static,
):
    """Program (column tile, row tile)."""
    start, tile, t, column, inside = _place(cut, static, out.shape[0])

    @pl.when(items_of(lists, static.linear, tile, static.tiles)[1] > 0)
    def _():
        y = plgpu.load(out.at[t, column], mask=inside, other=None if inside is None else 0)
        (delta,) = tile_deltas((lists, layer, h, b), tile, (start,), cut.block_n, static)
        total = (y.astype(jnp.float32) + delta).astype(out.dtype)
        plgpu.store(out.at[t, column], jnp.where(delta == 0, y, total), mask=inside)  # -0 + 0 would be 0


def _silu_mul_kernel(
    lists,  # [G, J + tiles, ITEM] int32
    layer,  # [1] int32
    h,  # [2, halves, J, BT, ITEM]
    b,  # [L, P * Q, 2F]
    gate_up,  # [T, 2F]
    out,  # [T, F]
    *,
    cut: ExpandCut,
    static: Static,
):
    """Program (column tile, row tile)."""
    tokens, width = out.shape
    start, tile, t, column, inside = _place(cut, static, tokens)
    other = None if inside is None else 0
    loaded = [plgpu.load(gate_up.at[t, column + s * width], mask=inside, other=other) for s in range(2)]
    deltas = tile_deltas((lists, layer, h, b), tile, (start, start + width), cut.block_n, static)
    gate, up = (y.astype(jnp.float32) + delta for y, delta in zip(loaded, deltas, strict=True))
    plgpu.store(out.at[t, column], silu_mul(gate, up, out.dtype), mask=inside)


# ---- 3. the calls ----------------------------------------------------------------------------------------------------
def _check_cut(op: str, cut: ExpandCut, slices: tuple[int, ...]) -> None:
    if cut.block_n < 16 or any(width % cut.block_n for width in slices):
        raise ValueError(f"{op}: tiles of {cut.block_n} columns must divide the slices {slices}")


def _triton_add(y, h, adapters: TileAdapters, cut: ExpandCut, interpret: bool) -> jax.Array:
    _check_cut("lora_add", cut, adapters.slices)
    return pl.pallas_call(
        functools.partial(_add_kernel, cut=cut, static=Static.of(adapters)),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        grid=(y.shape[1] // cut.block_n, adapters.tiles),
        input_output_aliases={4: 0},
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        name="lora_add",
        interpret=interpret,
    )(*operands(h, adapters), y)


def _triton_silu_mul(gate_up, h, adapters: TileAdapters, cut: ExpandCut, interpret: bool) -> jax.Array:
    _check_cut("lora_silu_mul", cut, adapters.slices)
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    return pl.pallas_call(
        functools.partial(_silu_mul_kernel, cut=cut, static=Static.of(adapters)),
        out_shape=jax.ShapeDtypeStruct((tokens, width), gate_up.dtype),
        grid=(width // cut.block_n, adapters.tiles),
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        name="lora_silu_mul",
        interpret=interpret,
    )(*operands(h, adapters), gate_up)


# ---- 4. the plain-JAX form -------------------------------------------------------------------------------------------
def _xla_delta(h: jax.Array, adapters: TileAdapters) -> jax.Array:
    """float32 [T, N]"""
    tokens, outputs = adapters.slot_ids.shape[0], adapters.b.shape[3]
    number, tile = tile_of_items(adapters)
    b_row = b_row_of(number)
    b = adapters.b[adapters.layer].reshape(-1, outputs)
    offsets = layout.slice_offsets(adapters.slices)

    def body(j, out):
        there = (number[j] >= 0)[:, None]
        b_rn = jnp.where(there, b[b_row[j]], 0).astype(jnp.float32)
        h_tr = jnp.where(there.T, jnp.sum(h[:, :, j].astype(jnp.float32), axis=1), 0.0)  # h may be undefined there
        parts = zip(h_tr, offsets, adapters.slices, strict=True)
        delta = [jnp.dot(hs, b_rn[:, o : o + width], precision="highest") for hs, o, width in parts]
        return out.at[tile[j]].add(jnp.concatenate(delta, axis=1))

    zeros = jnp.zeros((adapters.tiles, adapters.block_t, outputs), jnp.float32)
    return lax.fori_loop(0, adapters.room, body, zeros).reshape(-1, outputs)[:tokens]
