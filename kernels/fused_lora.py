"""Adapters inside a product of few rows, without a launch of their own.

The grid of the product begins with a few programs that shrink: h = x @ A^T, of which each row keeps its own adapter's. Programs
that read h wait for it, which costs little: by then the product's own programs keep memory busy. They come later in the grid
than what they wait for, so that they never hold its place.
With memory busy each step that depends on another takes microseconds: h stays in its parts of K, and who reads it adds them up.
Work comes in items of up to ITEM rank rows of one slot: mixed ranks cost what their rows cost, and one program serves any
number of adapters.
Letters: T rows, K inputs, N outputs, L layers, S slots, R padded rank, Q ranks of a place, n slices, J items at most, P parts of
K (of B: places), G linears of a layer. Sources: Hu et al., "LoRA", 2021; Chen et al., "Punica", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .arrivals import when_last
from .fused_plan import Refs
from .in_kernel import dot, full, pick, positions, split
from .lora_items import ITEM, RANKS, SLOT

POLLS = 1 << 20  # about a second: then an arrival was lost, and the result is NaN instead of a hang


def run(
    x, refs: Refs, tiles: int, parts: int, product: Callable[..., None], expand_tile: Callable[..., None] | None
) -> None:
    """A kernel's body, in the grid of `with_adapters`: shrinks, or product(tile, part), or expand_tile(tile)."""
    pid, shrinkers, products = pl.program_id(0), refs.plan.shrinkers, tiles * parts
    at = pid - shrinkers
    if shrinkers and refs.plan.tiles.spread:
        before, after = (lax.div((pid + i) * shrinkers, shrinkers + products) for i in (0, 1))
        shrinks = (pid < shrinkers + products) & (after > before)
        pl.when(shrinks)(lambda: _shrink(x, refs, before))
        at = jnp.where(shrinks, -1, pid - jnp.minimum(before, shrinkers))
    elif shrinkers:
        pl.when(pid < shrinkers)(lambda: _shrink(x, refs, pid))
    pl.when((at >= 0) & (at < products))(lambda: product(lax.rem(at, tiles), lax.div(at, tiles)))
    if expand_tile is not None:
        pl.when(at >= products)(lambda: expand_tile(at - products))


# ---- 1. shrink -------------------------------------------------------------------------------------------------------
def _shrink(x, refs: Refs, pid) -> None:
    """Program (group, part): one part of K of every groups-th pass, which is tiles.items items."""
    plan, count = refs.plan, refs.count()
    group, part = lax.div(pid, plan.tiles.parts), lax.rem(pid, plan.tiles.parts)

    def one(i, _):
        which = group + i * plan.tiles.groups
        pl.when(which * plan.tiles.items < count)(lambda: _shrink_pass(x, refs, which, part, count))
        return _

    lax.fori_loop(0, layout.cdiv(plan.passes, plan.tiles.groups), one, 0)


def _shrink_pass(x, refs: Refs, which, part, count) -> None:
    plan, first = refs.plan, which * refs.plan.tiles.items
    (rows, inputs), n, block_k, width = x.shape, len(plan.slices), plan.tiles.block_k, plan.pieces * ITEM
    steps = layout.cdiv(inputs // block_k, plan.tiles.parts)

    def pieces_of(pieces):
        """Of pieces of the pass: slice, item, whether there is such an item."""
        item = lax.div(pieces, n)
        return lax.rem(pieces, n), first + item, (item < plan.tiles.items) & (first + item < count)

    c = lax.iota(jnp.int32, width)
    at_slice, j, inside = pieces_of(lax.div(c, ITEM))
    r, listed = lax.rem(c, ITEM), j < plan.room
    there = inside & (r < refs.field(RANKS, j, listed))
    b_row = plgpu.load(refs.items.at[full(plan.linear, c.shape), j * ITEM + r], mask=listed, other=0)
    place = lax.div(b_row, refs.place)
    a_row = at_slice * refs.place + b_row - place * refs.place

    at, own = refs.own(*pieces_of(lax.iota(jnp.int32, plan.pieces)))  # before the loop: what it loads is there after it

    def body(i, h):
        k0 = (part * steps + i) * block_k
        t, k = positions((plan.padded, block_k))
        x_tk = plgpu.load(x.at[t, k0 + k], mask=t < rows, other=0)
        shape = (width, block_k)
        wide = lambda v: jnp.broadcast_to(v[:, None], shape)  # noqa: E731
        at = (full(refs.layer[0], shape), wide(place), wide(a_row), k0 + positions(shape)[1])
        return h + dot(x_tk, plgpu.load(refs.a.at[at], mask=wide(there), other=0).T)

    here = jnp.minimum(steps, inputs // block_k - part * steps)
    h = lax.fori_loop(0, here, body, jnp.zeros((plan.padded, width), jnp.float32))
    at, h = refs.apart(at, own), h.reshape(own.shape)
    part_of = lambda p: refs.h.at[full(p, own.shape), *at]  # noqa: E731

    def arrive() -> None:
        if not refs.interpret:
            plgpu.debug_barrier()  # what all threads of this program stored lies before its arrival
        plgpu.atomic_add(refs.counters, (refs.flag(),), jnp.int32(1))

    plgpu.store(part_of(part), h, mask=own)  # of each row its own adapter's: another row's inf must not reach this one
    if not plan.joined:
        return arrive()

    def join() -> None:
        whole = functools.reduce(jnp.add, [plgpu.load(part_of(p), mask=own, other=0) for p in range(plan.tiles.parts)])
        to, where = refs.listed(*pieces_of(lax.iota(jnp.int32, plan.pieces))) if plan.dense else (at, own)
        to = refs.apart(to, where)
        for i, half in enumerate(split(whole, refs.joined.dtype)):
            plgpu.store(refs.joined.at[full(i, own.shape), *to], half, mask=where)
        arrive()

    when_last(refs.counters, refs.counter(which), plan.tiles.parts, join, interpret=refs.interpret)


# ---- 2. expand -------------------------------------------------------------------------------------------------------
def _finished(refs: Refs) -> jax.Array:
    """Waits for all of h. False: it never came."""
    plan, flag = refs.plan, refs.flag()
    wanted = pl.cdiv(refs.count(), plan.tiles.items) * (1 if plan.joined else plan.tiles.parts)
    if refs.interpret:  # programs run one after the other
        return refs.counters[flag] >= wanted
    read = lambda: plgpu.atomic_add(refs.counters, (flag,), jnp.int32(0))  # noqa: E731
    again = lambda seen: (seen[0] < wanted) & (seen[1] < POLLS)  # noqa: E731
    seen, _ = lax.while_loop(again, lambda seen: (read(), seen[1] + 1), (jnp.int32(0), jnp.int32(0)))
    plgpu.debug_barrier()  # nobody reads h before all know
    return seen >= wanted


def _sum_of_parts(refs: Refs, at: tuple, mask) -> jax.Array:
    load = lambda p: plgpu.load(refs.h.at[full(p, mask.shape), *at], mask=mask, other=0)  # noqa: E731
    return functools.reduce(jnp.add, [load(p) for p in range(refs.plan.tiles.parts)])


def _hold(refs: Refs, at_slice, count) -> jax.Array:
    """h of one slice, of each row's own adapter: [padded T, ITEM]. What is no adapter's is anything."""
    row, r = positions((refs.plan.padded, ITEM))
    rows = refs.slot_ids.shape[0]
    return _sum_of_parts(refs, (at_slice * rows + row, r), (row < rows) & (count > 0))


def _h(refs: Refs, at_slice, held: jax.Array, column0, count) -> list[jax.Array]:
    """A chunk of h of one slice as tensor cores take it, zeros where a row has another adapter: [padded T, chunk], and in a
    dtype of fewer bits than float32 what that leaves of it."""
    plan = refs.plan
    j = lax.div(column0, ITEM) + lax.iota(jnp.int32, plan.tiles.chunk // ITEM)
    own = refs.own(full(at_slice, j.shape), j, j < count)[1]
    h = jnp.where(
        own, jnp.broadcast_to(held[:, None], own.shape), 0.0
    )  # not times zero: inf must not reach another row
    return split(h.reshape(plan.padded, plan.tiles.chunk), refs.b.dtype)


class Listed(NamedTuple):
    """In registers: slot and first row of B of each item [J or more], and the slot of each row [padded T]."""

    slot: jax.Array
    b_row: jax.Array
    slot_ids: jax.Array

    @classmethod
    def load(cls, refs: Refs) -> Listed:
        j, t = lax.iota(jnp.int32, 1 << (refs.plan.room - 1).bit_length()), lax.iota(jnp.int32, refs.plan.padded)
        there, rows = j < refs.count(), refs.slot_ids.shape[0]
        b_row = plgpu.load(refs.items.at[full(refs.plan.linear, j.shape), j * ITEM], mask=there, other=0)
        slot_ids = plgpu.load(refs.slot_ids.at[t], mask=t < rows, other=-1)
        return cls(refs.field(SLOT, j, there), b_row, slot_ids)


def _add_joined(sums: tuple, starts: tuple, at_slices: tuple, refs: Refs, listed: Listed) -> tuple[jax.Array, ...]:
    """sums + h @ B, in steps that are pipelined like a product's. Of h that is not dense only a row's own is loaded, the rest of a
    tile is zero."""
    plan, chunk, rows, count = refs.plan, refs.plan.tiles.chunk, refs.slot_ids.shape[0], refs.count()
    halves = range(refs.joined.shape[0])

    def body(i, sums):
        (t, c), r = positions((plan.padded, chunk)), lax.iota(jnp.int32, chunk)
        own, b_row = jnp.zeros(t.shape, jnp.bool_), jnp.zeros(r.shape, jnp.int32)
        for item in range(chunk // ITEM):
            j = i * (chunk // ITEM) + item
            b_row = jnp.where(lax.div(r, ITEM) == item, pick(listed.b_row, j), b_row)
            if not plan.dense:
                has = (listed.slot_ids == pick(listed.slot, j)) & (j < count)
                own |= (lax.div(c, ITEM) == item) & jnp.broadcast_to(has[:, None], own.shape)
        b_row = b_row + jnp.minimum(lax.rem(r, ITEM), refs.place - 1)
        column = lax.rem(c, ITEM)
        if plan.dense:
            column = i * chunk + c
            own = (t < rows) & (column < count * ITEM)
        out = []
        for of_halves, start, at_slice in zip(sums, starts, at_slices, strict=True):
            b_rn = _b_tile(refs, start, of_halves[0].shape[1], i, count, b_row)
            at = [(full(half, t.shape), at_slice * rows + t, column) for half in halves]
            h = [plgpu.load(refs.joined.at[of], mask=own, other=0) for of in at]
            out.append(tuple(total + dot(half, b_rn) for total, half in zip(of_halves, h, strict=True)))
        return tuple(out)

    # a sum for each half, so that one product does not wait for the other
    first = tuple((total, *(jnp.zeros(total.shape, jnp.float32) for _ in halves[1:])) for total in sums)
    last = lax.fori_loop(0, pl.cdiv(count * ITEM, chunk), body, first)
    return tuple(functools.reduce(jnp.add, of_halves) for of_halves in last)


def _b_tile(refs: Refs, start, block_n: int, i, count, b_row: jax.Array | None = None) -> jax.Array:
    """The i-th chunk of rank rows of B, which are `b_row`, of block_n columns from start on."""
    chunk = refs.plan.tiles.chunk
    r, c = positions((chunk, block_n))
    if b_row is None:
        at = i * chunk + lax.iota(jnp.int32, chunk)
        b_row = plgpu.load(refs.items.at[full(refs.plan.linear, at.shape), at], mask=at < count * ITEM, other=0)
    at = (full(refs.layer[0], r.shape), jnp.broadcast_to(b_row[:, None], r.shape), start + c)
    return plgpu.load(refs.b.at[at], mask=i * chunk + r < count * ITEM, other=0)


def expand_alone(start, block_n: int, refs: Refs) -> jax.Array:
    """h @ B, float32 [padded T, block_n], for block_n columns from start on."""
    return expand((jnp.zeros((refs.plan.padded, block_n), jnp.float32),), (start,), refs)[0]


def expand(sums: tuple, starts: tuple, refs: Refs) -> tuple[jax.Array, ...]:
    """sums + h @ B: float32 [padded T, columns] each, for the columns from each of `starts` on."""
    plan = refs.plan
    block_n, chunk, count = sums[0].shape[1], plan.tiles.chunk, refs.count()
    at_slices = tuple(layout.slice_of(start, plan.slices) for start in starts)
    if plan.joined:
        listed = Listed.load(refs)
        finished = _finished(refs)
        sums = _add_joined(sums, starts, at_slices, refs, listed)
        return tuple(jnp.where(finished, total, jnp.nan) for total in sums)

    def b_tiles(i) -> tuple[jax.Array, ...]:
        return tuple(_b_tile(refs, start, block_n, i, count) for start in starts)

    tiles = b_tiles(0)  # under way while this program waits
    finished = _finished(refs)
    held = [_hold(refs, at_slice, count) for at_slice in at_slices]

    def add(sums, tiles, i):
        out = []
        for total, at_slice, own, b_rn in zip(sums, at_slices, held, tiles, strict=True):
            for h in _h(refs, at_slice, own, i * chunk, count):
                total = total + dot(h, b_rn)
            out.append(total)
        return tuple(out)

    def body(carry):
        i, sums, tiles = carry
        following = b_tiles(i + 1)
        return i + 1, add(sums, tiles, i), following

    if plan.room * ITEM <= chunk:
        sums = add(sums, tiles, 0)
    else:  # no loop that would be pipelined: its loads of h would fill shared memory
        steps = pl.cdiv(count * ITEM, chunk)
        _, sums, _ = lax.while_loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), sums, tiles))
    return tuple(jnp.where(finished, total, jnp.nan) for total in sums)
