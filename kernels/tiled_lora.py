"""Adapters beside a product of many rows: what a tile of rows needs of them, and no more.

A tile of BT rows has items: up to ITEM rank rows of a slot that any of its rows uses. `lora_shrink_tiles` leaves h = x @ A^T of
every item of every tile as an operand that tensor cores take as it is, zeros in the rows of other adapters. So whoever reads the
product next adds h @ B in a dot or two an item (`tiled_expand`).
Letters: T rows, K inputs, N outputs, L layers, S slots, R padded rank, n slices, J items of all tiles at most, P parts of K,
G linears of a layer. Sources: Hu et al., "LoRA", 2021; Chen et al., "Punica", 2023.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .arrivals import check_arrivals, when_last
from .in_kernel import dot, full, halves, positions, split
from .lora_items import ITEM
from .lora_shrink import lora_shrink
from .places import check_places, pieces
from .tile_items import GROUP, OWNER, b_row_of
from .tuning import ShrinkCut, shrink_cut, tile_rows


# ---- 1. operands -----------------------------------------------------------------------------------------------------
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["a", "b", "slot_ids", "items", "layer", "places"],
    meta_fields=["slices", "linear", "block_t"],
)
@dataclass(frozen=True)
class TileAdapters:
    """The adapters of one linear in one step of many rows.

    a [L, P, n*Q, K] and b [L, P, Q, N] as `lora_layout` says, finite everywhere; slot_ids int32 [T], -1: none; items int32
    [G, J + tiles, ITEM]: of `tile_items`; layer int32 scalar, an operand. slices: widths of the n output slices; linear: which of
    the G lists is this linear's; block_t: rows of a tile; places int32 [S, C] as `places` says, None: they are slots.
    """

    a: jax.Array
    b: jax.Array
    slot_ids: jax.Array
    items: jax.Array
    layer: jax.Array
    slices: tuple[int, ...]
    linear: int
    block_t: int
    places: jax.Array | None = None

    @classmethod
    def of(cls, a, b, slot_ids, items, layer, slices: tuple[int, ...], linear: int, places=None) -> TileAdapters:
        """With the tiles of `tile_rows`."""
        block_t = tile_rows(slot_ids.shape[0], a.dtype.itemsize)
        return cls(a, b, slot_ids, items, layer, slices, linear, block_t, places)

    @property
    def tiles(self) -> int:
        return layout.cdiv(self.slot_ids.shape[0], self.block_t)

    @property
    def room(self) -> int:
        """J"""
        return self.items.shape[1] - self.tiles


def fits_tiles(inputs: int, slices: tuple[int, ...], dtype: Any) -> bool:
    """Whether linears of these sizes may have `TileAdapters`. Not in float16, where h could overflow."""
    sizes_fit = not any(size % ITEM for size in (inputs, *slices))
    return jnp.dtype(dtype) != jnp.float16 and sizes_fit and len(slices) <= 4


def check_tile_adapters(op: str, adapters: TileAdapters, rows: int) -> None:
    """Raises: ValueError naming the operand."""
    a, b, n, block_t = adapters.a, adapters.b, len(adapters.slices), adapters.block_t
    ok = a.ndim == b.ndim == 4 and a.shape[:2] == b.shape[:2] and a.shape[2] == n * b.shape[2]
    if not ok or sum(adapters.slices) != b.shape[3]:
        raise ValueError(
            f"{op}: needs a [L, S, {n} * R, K] and b [L, S, R, {sum(adapters.slices)}], got {a.shape} and {b.shape}"
        )
    layout.check_dtype(op, "a", a.dtype)
    if a.dtype != b.dtype or not fits_tiles(a.shape[3], adapters.slices, a.dtype):
        raise ValueError(
            f"{op}: a and b must be of one dtype and slices {adapters.slices} of {a.shape[3]} inputs as fits_tiles says, "
            f"got {a.dtype} and {b.dtype}"
        )
    if block_t & (block_t - 1) or block_t < 16:
        raise ValueError(f"{op}: block_t must be a power of two from 16 on, got {block_t}")
    layout.check_rows(op, rows, adapters.slot_ids, adapters.layer)
    check_places(op, adapters.places, adapters.b.shape[2], ITEM)
    items = adapters.items
    if (
        items.dtype != jnp.int32
        or items.ndim != 3
        or items.shape[2] != ITEM
        or adapters.room < GROUP
        or not 0 <= adapters.linear < items.shape[0]
    ):
        want = f"int32 [G > {adapters.linear}, J + {adapters.tiles}, {ITEM}]"
        raise ValueError(f"{op}: items must be {want}, got {items.dtype} {items.shape}")


def h_shape(adapters: TileAdapters) -> jax.ShapeDtypeStruct:
    """[n, halves, J, BT, ITEM]: h, in a dtype of fewer bits than float32 high and low part."""
    dtype = adapters.a.dtype
    return jax.ShapeDtypeStruct((len(adapters.slices), halves(dtype), adapters.room, adapters.block_t, ITEM), dtype)


def items_of(lists, linear: int, tile, tiles: int) -> tuple[Any, Any]:
    """In a kernel: a tile's first item, and how many it has."""
    line = lists.shape[1] - tiles + tile
    return lists[linear, line, 0], lists[linear, line, 1]


# ---- 2. the public op ------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("cut", "implementation", "interpret"))
def lora_shrink_tiles(
    x: jax.Array,
    adapters: TileAdapters,
    arrivals: jax.Array,
    *,
    cut: ShrinkCut | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(h as `h_shape` says, arrivals): of each item x @ A^T in the rows of its adapter, zeros in the tile's others; undefined where
    no tile has an item.

    x [T, K] of a's dtype; arrivals: of `new_arrivals`, a piece an item, donated by the caller or copied. A row's bits do not depend
    on the other rows, nor on which slots are in use. Raises: ValueError naming the operand.
    """
    layout.check_implementation("lora_shrink_tiles", implementation)
    if x.ndim != 2 or x.dtype != adapters.a.dtype or x.shape[1] != adapters.a.shape[3]:
        raise ValueError(
            f"lora_shrink_tiles: x must be {adapters.a.dtype} [T, {adapters.a.shape[3]}], got {x.dtype} {x.shape}"
        )
    check_tile_adapters("lora_shrink_tiles", adapters, x.shape[0])
    check_arrivals("lora_shrink_tiles", arrivals, adapters.room)
    if implementation == "xla":
        return _xla(x, adapters), arrivals
    rows, inputs = x.shape
    cut = cut or shrink_cut(rows, inputs, adapters.block_t, len(adapters.slices), x.dtype.itemsize)
    return _triton(x, adapters, arrivals, cut, interpret)


# ---- 3. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(
    slot_ids,  # [T] int32
    lists,  # [G, J + tiles, ITEM] int32
    layer,  # [1] int32
    x,  # [T, K]
    a,  # [L, P * n * Q, K]
    _,  # counters, the same memory as below
    h,  # [n, halves, J, BT, ITEM]
    counters,
    sums,  # [P, J, BT, width of an item] float32, scratch
    *,
    cut: ShrinkCut,
    linear: int,
    tiles: int,
    rank: int,
    interpret: bool,
):
    """Program (part, group): the part of K for a group of items of one tile, their slices side by side. The last program of a group
    adds the parts up. Groups that the step has are first in the grid: a program of another ends at once."""
    part, which = pl.program_id(0), pl.program_id(1)
    (tokens, inputs), (n, _, _, block_t, _) = x.shape, h.shape
    width, first = cut.width(n), which * cut.group
    steps = layout.cdiv(inputs // cut.block_k, cut.parts)
    here = jnp.minimum(steps, inputs // cut.block_k - part * steps)

    def place(column) -> tuple[jax.Array, Any, jax.Array]:
        """Of a group's columns: slice, item after the group's first, rank row. Said so that Triton sees what lies side by side."""
        block = lax.div(column, ITEM)
        at_slice = block if cut.group == 1 else lax.div(block, cut.group)
        return at_slice, block - at_slice * cut.group, lax.rem(column, ITEM)

    # What each step depends on is loaded at once.
    at_slice, item, r = place(lax.iota(jnp.int32, width))
    listed = plgpu.load(lists.at[full(linear, (width,)), first + item, r])
    tile = _tile_of(lists, linear, first, tiles)
    number = jnp.where(at_slice < n, listed, -1)  # of each column, as `tile_items` says, -1: none

    def product() -> jax.Array:
        b_row = b_row_of(number)
        place_ = lax.div(b_row, rank)
        a_row = (place_ * n + at_slice) * rank + b_row - place_ * rank

        def body(i, acc):
            k0 = (part * steps + i) * cut.block_k
            row, k = positions((block_t, cut.block_k), k0)
            t = tile * block_t + row
            mask = None if tokens % block_t == 0 else t < tokens
            x_tk = plgpu.load(x.at[t, k], mask=mask, other=None if mask is None else 0)
            _, k = positions((width, cut.block_k), k0)
            at = (full(layer[0], k.shape), jnp.broadcast_to(a_row[:, None], k.shape), k)
            a_ck = plgpu.load(a.at[at], mask=jnp.broadcast_to((number >= 0)[:, None], k.shape), other=0)
            return acc + dot(x_tk, a_ck.T)

        return lax.fori_loop(0, here, body, jnp.zeros((block_t, width), jnp.float32))

    def put(value) -> None:
        """The finished h."""
        t = tile * block_t + lax.iota(jnp.int32, block_t)
        ids = plgpu.load(slot_ids.at[t], mask=t < tokens, other=-1)
        own = (number >= 0)[None, :] & (ids[:, None] == (number >> OWNER)[None, :])
        value = jnp.where(own, value, 0.0)  # never a product with zero: another row's inf must not reach this one
        row, c = positions((block_t, width))
        s, j, k = place(c)
        mask = None if width == n * cut.group * ITEM else s < n
        for q, half in enumerate(split(value, h.dtype)):
            plgpu.store(h.at[s, full(q, s.shape), first + j, row, k], half, mask=mask)

    def sums_of(p):
        row, c = positions((block_t, width))
        own = width // cut.group
        return sums.at[full(p, c.shape), first + lax.div(c, own), row, lax.rem(c, own)]

    def join() -> None:
        put(functools.reduce(jnp.add, [plgpu.load(sums_of(p)) for p in range(cut.parts)]))

    @pl.when(jnp.max(number) >= 0)
    def _():
        if cut.parts == 1:
            return put(product())
        plgpu.store(sums_of(part), product())
        when_last(counters, which, cut.parts, join, interpret=interpret)


def _tile_of(lists, linear: int, item, tiles: int) -> jax.Array:
    """The tile that an item is of, if it is of one."""
    t = lax.iota(jnp.int32, 1 << (tiles - 1).bit_length())
    line = lists.shape[1] - tiles + t
    begin = plgpu.load(lists.at[full(linear, t.shape), line, full(0, t.shape)], mask=t < tiles, other=0)
    begun = (begin <= item) & (t < tiles)  # a tile without items begins where the next does
    return jnp.sum(begun.astype(jnp.int32)) - 1


# ---- 4. the call -----------------------------------------------------------------------------------------------------
def _triton(
    x: jax.Array, adapters: TileAdapters, arrivals: jax.Array, cut: ShrinkCut, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    layers, slots, n_rank, inputs = adapters.a.shape
    n, like, h = len(adapters.slices), jax.ShapeDtypeStruct, h_shape(adapters)
    if cut.block_k > inputs or inputs % cut.block_k or GROUP % cut.group:
        raise ValueError(
            f"lora_shrink_tiles: steps of {cut.block_k} must divide K = {inputs}, groups of {cut.group} {GROUP}"
        )
    # No part is empty: each has the same number of steps but the last, which may have less.
    blocks = inputs // cut.block_k
    cut = cut._replace(parts=layout.cdiv(blocks, layout.cdiv(blocks, cut.parts)))
    groups = adapters.room // cut.group  # as many as can be: a tile's first item is a multiple of GROUP
    sums = (cut.parts, adapters.room, adapters.block_t, cut.width(n) // cut.group) if cut.parts > 1 else (1, 1, 1, 16)
    h, counters, _ = pl.pallas_call(
        functools.partial(
            _kernel, cut=cut, linear=adapters.linear, tiles=adapters.tiles, rank=n_rank // n, interpret=interpret
        ),
        out_shape=(h, like(arrivals.shape, arrivals.dtype), like(sums, jnp.float32)),
        grid=(cut.parts, groups),
        input_output_aliases={5: 1},
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        name="lora_shrink_tiles",
        interpret=interpret,
    )(
        adapters.slot_ids,
        adapters.items,
        adapters.layer.reshape(1),
        x,
        adapters.a.reshape(layers, slots * n_rank, inputs),
        arrivals,
    )
    return h, counters


# ---- 5. the plain-JAX form -------------------------------------------------------------------------------------------
def tile_of_items(adapters: TileAdapters) -> tuple[jax.Array, jax.Array]:
    """(of each item its numbers, int32 [J, ITEM], -1: none; its tile, int32 [J])."""
    own = adapters.items[adapters.linear]
    tile = jnp.searchsorted(own[adapters.room :, 0], jnp.arange(adapters.room), side="right") - 1
    return own[: adapters.room], tile


def _xla(x: jax.Array, adapters: TileAdapters) -> jax.Array:
    tokens, n, q, like = x.shape[0], len(adapters.slices), adapters.b.shape[2], h_shape(adapters)
    own = pieces(adapters.slot_ids, adapters.places)
    shrunk = [lora_shrink(x, adapters.a, ids, adapters.layer, implementation="xla")[0] for ids in own]
    h = jnp.concatenate([h.reshape(tokens, n, q) for h in shrunk], axis=2)  # [T, n, R]
    number, tile = tile_of_items(adapters)
    row = tile[:, None] * adapters.block_t + jnp.arange(adapters.block_t)  # [J, BT]
    owner, b_row = jnp.maximum(number >> OWNER, 0), b_row_of(number)
    piece = 0
    if adapters.places is not None:
        piece = jnp.argmax(adapters.places[owner] == (b_row // q)[..., None], axis=-1)
    of_row = h.at[row].get(mode="clip")  # [J, BT, n, R]
    h = jnp.take_along_axis(of_row, (piece * q + b_row % q)[:, None, None] % h.shape[2], axis=3)
    ids = adapters.slot_ids.at[row].get(mode="fill", fill_value=-1)
    mine = (number >= 0)[:, None] & (owner[:, None] == ids[..., None])  # [J, BT, ITEM]
    h = jnp.where(mine[:, :, None], h, 0.0).transpose(2, 0, 1, 3)
    return jnp.stack(split(h, like.dtype), axis=1)
