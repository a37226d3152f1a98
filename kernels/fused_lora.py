"""Adapters inside a product of few rows, without a launch of their own.

The grid of the product begins with a few programs that shrink: h = x @ A^T, left as an operand that tensor cores take as it is,
zeros in the rows of other adapters. Programs that read h wait for it, which costs little: by then the product's own programs
keep memory busy. They come later in the grid than what they wait for, so that they never hold its place.
Work comes in items of up to ITEM rank rows of one slot: mixed ranks cost what their rows cost, and one program serves any
number of adapters.
Letters: T rows, K inputs, N outputs, L layers, S slots, R padded rank, n slices, J items at most, P parts of K, G linears of
a layer. Sources: Hu et al., "LoRA", 2021; Chen et al., "Punica", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .adapters import LINE, Adapters
from .arrivals import when_last
from .in_kernel import dot, full, halves, padded_rows, positions, split
from .lora_items import COUNT, FIELDS, FIRST, ITEM, RANKS, SLOT
from .tuning import LoRATiles, lora_tiles

POLLS = 1 << 20  # about a second: then an arrival was lost, and the result is NaN instead of a hang


# ---- 1. how the work is cut ------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    """Static. padded: rows of a tile. room: J. expanders: programs that only expand, after those of the product. begun: parts
    that h comes in, 0: this kernel shrinks."""

    slices: tuple[int, ...]
    linear: int
    padded: int
    room: int
    rank: int
    tiles: LoRATiles
    expanders: int
    begun: int

    @property
    def shrinkers(self) -> int:
        return 0 if self.begun else self.tiles.groups * self.tiles.parts

    @property
    def width(self) -> int:
        """Rank rows of an item, all slices, as tensor cores take them."""
        return padded_rows(len(self.slices) * ITEM)


def item_field(items, linear: int, field: int, j, mask=None) -> jax.Array:
    """In a kernel: a field of one item j, or of an array of them."""
    at = items.shape[1] // FIELDS * (ITEM + field) + j
    if jnp.ndim(j) == 0:
        return items[linear, at]
    return plgpu.load(items.at[full(linear, j.shape), at], mask=mask, other=None if mask is None else 0)


class Refs(NamedTuple):
    """What a kernel sees of the adapters; sums and operand are scratch, None with `begun`, which then lies in a's place."""

    a: Any
    b: Any  # [L, S * R, N]
    slot_ids: Any
    items: Any
    layer: Any
    sums: Any  # [J * P, padded T, width] float32
    operand: Any  # [n, 1 or 2, padded T, J * ITEM]: h, in a dtype of fewer bits than float32 high and low part
    counters: Any
    plan: Plan
    interpret: bool

    def field(self, i: int, j) -> jax.Array:
        """Of item j: its slot (0), first rank row (1), rank rows (2)."""
        return item_field(self.items, self.plan.linear, i, j)

    def count(self) -> jax.Array:
        return self.field(COUNT, 0)

    def counter(self, j):
        """Of item j: its parts that are done."""
        return self.counters.shape[0] - self.plan.room + j

    def flag(self):
        """Counts the items of this linear in this layer that are finished."""
        number = self.layer[0] * self.items.shape[0] + self.plan.linear
        return self.counters.shape[0] - self.plan.room - (number + 1) * LINE


class Call(NamedTuple):
    """A `pallas_call` of a product with or without adapters: all that it is given, what comes after the product's own results
    (arrivals, then scratch), its grid."""

    given: tuple[jax.Array, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    plan: Plan | None

    def aliases(self, own: int) -> dict[int, int]:
        """own: the product's own results."""
        return {len(self.given) - 1: own} if self.results else {}


def with_adapters(
    adapters: Adapters | None,
    arrivals: jax.Array | None,
    given: tuple,
    grid: tuple[int, int],
    expanders: int,
    block_n: int,
) -> Call:
    """given and grid: of the product alone, in tiles of block_n columns. expanders: 0 where the product's own programs expand.
    Raises: ValueError for tiles, which may be stored ones, that would reach over a slice."""
    if adapters is None:
        return Call(given, (), grid, None)
    assert arrivals is not None
    if any(width % block_n for width in adapters.slices):
        raise ValueError(f"adapters: slices {adapters.slices} are no multiples of a tile of {block_n} columns")
    (layers, slots, rank, outputs), dtype = adapters.b.shape, adapters.a.dtype
    rows, inputs, n = adapters.slot_ids.shape[0], adapters.a.shape[3], len(adapters.slices)
    room, padded = adapters.items.shape[1] // FIELDS, padded_rows(rows)
    tiles = lora_tiles(rows, inputs, n, room, dtype.itemsize, waits=expanders > 0)
    begun = adapters.begun
    plan = Plan(
        adapters.slices, adapters.linear, padded, room, rank, tiles, expanders, 0 if begun is None else begun.shape[0]
    )
    b = adapters.b.reshape(layers, slots * rank, outputs)
    first = adapters.a if begun is None else begun
    more = (first, b, adapters.slot_ids, adapters.items, adapters.layer.reshape(1), arrivals)
    like = jax.ShapeDtypeStruct
    results = [like(arrivals.shape, arrivals.dtype)]
    if begun is None:
        results.append(like((room * tiles.parts, padded, plan.width), jnp.float32))
        results.append(like((n, halves(dtype), padded, room * ITEM), dtype))
    programs = plan.shrinkers + grid[0] * grid[1] + expanders
    return Call((*given, *more), tuple(results), (programs,), plan)


def split_refs(
    refs: tuple, given: int, results: int, plan: Plan | None, interpret: bool
) -> tuple[tuple, tuple, Refs | None]:
    """(the product's own operands, its own results, the adapters' refs) of a kernel called as `with_adapters` says."""
    if plan is None:
        return refs[:given], refs[given:], None
    end = given + 6 + results
    a, b, slot_ids, items, layer, _ = refs[given : given + 6]
    counters, *scratch = refs[end:]
    sums, operand = scratch or (None, None)
    adapters = Refs(a, b, slot_ids, items, layer, sums, operand, counters, plan, interpret)
    return refs[:given], refs[end - results : end], adapters


def run(
    x, refs: Refs, tiles: int, parts: int, product: Callable[..., None], expand_tile: Callable[..., None] | None
) -> None:
    """A kernel's body, in the grid of `with_adapters`: shrinks, or product(tile, part), or expand_tile(tile)."""
    pid = pl.program_id(0)
    begin, end = refs.plan.shrinkers, refs.plan.shrinkers + tiles * parts
    if begin:
        pl.when(pid < begin)(lambda: _shrink(x, refs, pid))
    pl.when((pid >= begin) & (pid < end))(lambda: product(lax.rem(pid - begin, tiles), lax.div(pid - begin, tiles)))
    if expand_tile is not None:
        pl.when(pid >= end)(lambda: expand_tile(pid - end))


# ---- 2. in a kernel --------------------------------------------------------------------------------------------------
def _shrink(x, refs: Refs, pid) -> None:
    """Program (group, part): one part of K of every groups-th item."""
    groups, parts = refs.plan.tiles.groups, refs.plan.tiles.parts
    group, part, count = lax.div(pid, parts), lax.rem(pid, parts), refs.count()

    def item(i, _):
        j = group + i * groups
        pl.when(j < count)(lambda: _shrink_item(x, refs, j, part, count))
        return _

    lax.fori_loop(0, layout.cdiv(refs.plan.room, groups), item, 0)


def _shrink_item(x, refs: Refs, j, part, count) -> None:
    plan = refs.plan
    (rows, inputs), n, block_k = x.shape, len(plan.slices), plan.tiles.block_k
    slot, first_rank, ranks = (refs.field(i, j) for i in (SLOT, FIRST, RANKS))
    steps = layout.cdiv(inputs // block_k, plan.tiles.parts)
    shape = (plan.padded, plan.width)
    row, column = positions(shape)

    def body(i, h):
        k0 = (part * steps + i) * block_k
        t, k = positions((plan.padded, block_k))
        x_tk = plgpu.load(x.at[t, k0 + k], mask=t < rows, other=0)
        c, k = positions((plan.width, block_k))
        at_slice, r = lax.div(c, ITEM), lax.rem(c, ITEM)
        at = (full(refs.layer[0], c.shape), full(slot, c.shape), at_slice * plan.rank + first_rank + r, k0 + k)
        a_ck = plgpu.load(refs.a.at[at], mask=(at_slice < n) & (r < ranks), other=0)
        return h + dot(x_tk, a_ck.T)

    def arrive() -> None:
        if not refs.interpret:
            plgpu.debug_barrier()  # what all threads of this program stored lies before its arrival
        plgpu.atomic_add(refs.counters, (refs.flag(),), jnp.int32(1))

    here = jnp.minimum(steps, inputs // block_k - part * steps)
    h = lax.fori_loop(0, here, body, jnp.zeros(shape, jnp.float32))
    plgpu.store(refs.sums.at[full(j * plan.tiles.parts + part, shape), row, column], h)

    def finish() -> None:
        # A masked load, never a product with zero: another row's inf must not reach this one.
        own = plgpu.load(refs.slot_ids.at[row], mask=row < rows, other=-1) == slot
        of = lambda p: refs.sums.at[full(j * plan.tiles.parts + p, shape), row, column]  # noqa: E731
        h = functools.reduce(jnp.add, [plgpu.load(of(p), mask=own, other=0) for p in range(plan.tiles.parts)])
        _put_operand(h, refs, j, count)
        arrive()

    when_last(refs.counters, refs.counter(j), plan.tiles.parts, finish, interpret=refs.interpret)


def _put_operand(h, refs: Refs, j, count) -> None:
    """h [padded T, width] of item j, and zeros after the last item to the end of its chunk."""
    plan, operand = refs.plan, refs.operand
    row, column = positions(h.shape)
    at_slice, r = lax.div(column, ITEM), lax.rem(column, ITEM)
    inside = at_slice < len(plan.slices)
    parts = split(h, operand.dtype)

    def put(q: int, columns, value, mask) -> None:
        plgpu.store(operand.at[at_slice, full(q, h.shape), row, columns], value, mask=mask)

    for q, value in enumerate(parts):
        put(q, j * ITEM + r, value, inside)

    @pl.when(j == count - 1)
    def _():
        end = pl.cdiv(count * ITEM, plan.tiles.chunk) * plan.tiles.chunk
        for i in range(1, plan.tiles.chunk // ITEM):
            columns = (j + i) * ITEM + r
            for q, value in enumerate(parts):
                put(q, columns, jnp.zeros_like(value), inside & (columns < end))


def _finished(refs: Refs) -> jax.Array:
    """Waits for h of all items. False: it never came."""
    count, flag = refs.count(), refs.flag()
    if refs.interpret:  # programs run one after the other
        return refs.counters[flag] >= count
    read = lambda: plgpu.atomic_add(refs.counters, (flag,), jnp.int32(0))  # noqa: E731
    again = lambda seen: (seen[0] < count) & (seen[1] < POLLS)  # noqa: E731
    seen, _ = lax.while_loop(again, lambda seen: (read(), seen[1] + 1), (read(), jnp.int32(0)))
    plgpu.debug_barrier()  # nobody reads h before all know
    return seen >= count


def _h(refs: Refs, at_slice, column0) -> list[jax.Array]:
    """A chunk of the finished h of one slice, [padded T, chunk] and what that leaves of it."""
    plan = refs.plan
    row, column = positions((plan.padded, plan.tiles.chunk))
    at = lambda q: (full(at_slice, row.shape), full(q, row.shape), row, column0 + column)  # noqa: E731
    return [plgpu.load(refs.operand.at[at(q)]) for q in range(refs.operand.shape[1])]


def _begun(refs: Refs) -> list[jax.Array]:
    """h [padded T, max(16, R)] of every row's own adapter, and what that leaves of it."""
    row, r = positions((refs.plan.padded, refs.a.shape[2]))
    there = row < refs.slot_ids.shape[0]
    parts = [plgpu.load(refs.a.at[full(c, row.shape), row, r], mask=there, other=0) for c in range(refs.plan.begun)]
    return split(functools.reduce(jnp.add, parts), refs.b.dtype)


def _placed(begun: list[jax.Array], refs: Refs, column0, count) -> list[jax.Array]:
    """As `_h`, from `_begun`: each row's h in the columns of its own items."""
    row, column = positions((refs.plan.padded, refs.plan.tiles.chunk), column0)
    rank_row, of_column = positions((begun[0].shape[1], refs.plan.tiles.chunk), column0)
    ids = plgpu.load(refs.slot_ids.at[row], mask=row < refs.slot_ids.shape[0], other=-1)
    own = (column < count * ITEM) & (refs.field(SLOT, lax.div(column, ITEM)) == ids)
    here = rank_row == refs.field(FIRST, lax.div(of_column, ITEM)) + lax.rem(of_column, ITEM)
    # One product with ones and zeros moves columns, exactly; the choice keeps out rows that nobody wrote.
    moved = [dot(half, here.astype(half.dtype)) for half in begun]
    return [jnp.where(own, half, 0.0).astype(refs.b.dtype) for half in moved]


def expand_alone(starts: tuple, block_n: int, refs: Refs) -> tuple[jax.Array, ...]:
    """`expand` of zeros."""
    zeros = jnp.zeros((refs.plan.padded, block_n), jnp.float32)
    return expand(tuple(zeros for _ in starts), starts, refs)


def expand(sums: tuple, starts: tuple, refs: Refs) -> tuple[jax.Array, ...]:
    """sums + h @ B: float32 [padded T, columns] each, for the columns from each of `starts` on."""
    plan = refs.plan
    block_n, chunk, count = sums[0].shape[1], plan.tiles.chunk, refs.count()
    begun = _begun(refs) if plan.begun else None
    finished = True if plan.begun else _finished(refs)
    offsets = layout.slice_offsets(plan.slices)

    def body(i, sums):
        column0 = i * chunk
        b_row = refs.items[plan.linear, pl.ds(column0, chunk)]
        r, c = positions((chunk, block_n))
        out = []
        for total, start in zip(sums, starts, strict=True):
            at_slice = functools.reduce(jnp.add, [jnp.int32(0), *((start >= o).astype(jnp.int32) for o in offsets[1:])])
            at = (full(refs.layer[0], r.shape), jnp.broadcast_to(b_row[:, None], r.shape), start + c)
            b_rn = plgpu.load(refs.b.at[at], mask=column0 + r < count * ITEM, other=0)
            chunks = _h(refs, at_slice, column0) if begun is None else _placed(begun, refs, column0, count)
            for h in chunks:
                total = total + dot(h, b_rn)
            out.append(total)
        return tuple(out)

    sums = lax.fori_loop(0, pl.cdiv(count * ITEM, chunk), body, sums)
    return sums if plan.begun else tuple(jnp.where(finished, total, jnp.nan) for total in sums)
