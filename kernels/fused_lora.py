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
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .arrivals import check_arrivals, when_last
from .in_kernel import dot, full, padded_rows, positions
from .lora_expand import lora_expand
from .lora_items import FIELDS, ITEM
from .lora_shrink import lora_shrink
from .tuning import LoRATiles, lora_tiles, matmul_tiles

LINE = 32  # counters in a cache line
POLLS = 1 << 20  # about a second: then an arrival was lost, and the result is NaN instead of a hang


# ---- 1. operands -----------------------------------------------------------------------------------------------------
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["a", "b", "slot_ids", "items", "layer"],
    meta_fields=["slices", "linear"],
)
@dataclass(frozen=True)
class Adapters:
    """The adapters of one linear in one step.

    a [L, S, n*R, K] and b [L, S, R, N] as `lora_layout` says, finite everywhere; slot_ids int32 [T], -1: none; items int32
    [G, J * FIELDS]: of `work_items`; layer int32 scalar, an operand. slices: widths of the n output slices; linear: which of
    the G lists is this linear's.
    """

    a: jax.Array
    b: jax.Array
    slot_ids: jax.Array
    items: jax.Array
    layer: jax.Array
    slices: tuple[int, ...]
    linear: int


def adapter_counters(items: jax.Array, layers: int) -> int:
    """How many counters of `new_arrivals` a step needs beside its pieces, for lists as `Adapters` holds them: at its end one an
    item, zeros again after each kernel, and before them a line for each linear of each layer. Those count up once and stay:
    they are new in every step, in which each linear is computed once."""
    linears, room = items.shape[0], items.shape[1] // FIELDS
    return room + layers * linears * LINE


def fits_adapters(rows: int, inputs: int, slices: tuple[int, ...], dtype: Any) -> bool:
    """Whether products of these sizes, which `skinny_matmul.fits` takes, may carry adapters. Not in float16, where h could
    overflow; a tile of columns lies in one slice; more slices than four would not fit every card."""
    if jnp.dtype(dtype) == jnp.float16 or len(slices) > 4:
        return False
    block_n = matmul_tiles(rows, inputs, sum(slices), jnp.dtype(dtype).itemsize, adapters=True).block_n
    return not any(width % block_n for width in slices)


def check_adapters(
    op: str, adapters: Adapters, arrivals: Any, rows: int, inputs: int, outputs: int, dtype: Any
) -> None:
    """Raises: ValueError naming the operand."""
    a, b, n = adapters.a, adapters.b, len(adapters.slices)
    ok = a.ndim == b.ndim == 4 and a.shape[:2] == b.shape[:2] and a.shape[2] == n * b.shape[2]
    if not ok or a.shape[3] != inputs or b.shape[3] != outputs:
        raise ValueError(
            f"{op}: needs a [L, S, {n} * R, {inputs}] and b [L, S, R, {outputs}], got {a.shape} and {b.shape}"
        )
    if a.dtype != dtype or b.dtype != dtype:
        raise ValueError(f"{op}: a and b must have the dtype of the product ({dtype}), got {a.dtype} and {b.dtype}")
    if sum(adapters.slices) != outputs or not fits_adapters(rows, inputs, adapters.slices, dtype):
        raise ValueError(
            f"{op}: slices {adapters.slices} of {dtype} must add up to {outputs}, as multiples of a tile (see fits_adapters)"
        )
    layout.check_rows(op, rows, adapters.slot_ids, adapters.layer)
    items = adapters.items
    if (
        items.dtype != jnp.int32
        or items.ndim != 2
        or items.shape[1] % (4 * FIELDS)
        or not 0 <= adapters.linear < items.shape[0]
    ):
        want = f"int32 [G > {adapters.linear}, J * {FIELDS}], J a multiple of 4"
        raise ValueError(f"{op}: items must be {want}, got {items.dtype} {items.shape}")
    check_arrivals(op, arrivals, adapter_counters(items, a.shape[0]))


def plain_delta(x: jax.Array, adapters: Adapters) -> jax.Array:
    """In plain JAX: what the adapters add to x @ w, float32 [T, N]."""
    at = (adapters.slot_ids, adapters.layer)
    h = lora_shrink(x, adapters.a, *at, implementation="xla")
    zeros = jnp.zeros((x.shape[0], adapters.b.shape[3]), jnp.float32)
    return lora_expand(zeros, h, adapters.b, *at, slices=adapters.slices, implementation="xla")


# ---- 2. how the work is cut ------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    """Static. padded: rows of a tile. room: J. expanders: programs that only expand, after those of the product."""

    slices: tuple[int, ...]
    linear: int
    padded: int
    room: int
    rank: int
    tiles: LoRATiles
    expanders: int

    @property
    def shrinkers(self) -> int:
        return self.tiles.groups * self.tiles.parts

    @property
    def width(self) -> int:
        """Rank rows of an item, all slices, as tensor cores take them."""
        return max(16, 1 << (len(self.slices) * ITEM - 1).bit_length())


class Refs(NamedTuple):
    """What a kernel sees of the adapters; sums and operand are scratch."""

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
        return self.items[self.plan.linear, self.plan.room * (ITEM + i) + j]

    def count(self) -> jax.Array:
        return self.field(3, 0)

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
    adapters: Adapters | None, arrivals: jax.Array | None, given: tuple, grid: tuple[int, int], expanders: int
) -> Call:
    """given and grid: of the product alone. expanders: 0 where the product's own programs expand."""
    if adapters is None:
        return Call(given, (), grid, None)
    assert arrivals is not None
    (layers, slots, rank, outputs), dtype = adapters.b.shape, adapters.a.dtype
    rows, inputs, n = adapters.slot_ids.shape[0], adapters.a.shape[3], len(adapters.slices)
    room, padded = adapters.items.shape[1] // FIELDS, padded_rows(rows)
    tiles = lora_tiles(rows, inputs, n, room, dtype.itemsize, waits=expanders > 0)
    plan = Plan(adapters.slices, adapters.linear, padded, room, rank, tiles, expanders)
    b = adapters.b.reshape(layers, slots * rank, outputs)
    more = (adapters.a, b, adapters.slot_ids, adapters.items, adapters.layer.reshape(1), arrivals)
    like, halves = jax.ShapeDtypeStruct, 2 if dtype.itemsize < 4 else 1
    sums = like((room * tiles.parts, padded, plan.width), jnp.float32)
    operand = like((n, halves, padded, room * ITEM), dtype)
    programs = plan.shrinkers + grid[0] * grid[1] + expanders
    return Call((*given, *more), (like(arrivals.shape, arrivals.dtype), sums, operand), (programs,), plan)


def split_refs(
    refs: tuple, given: int, results: int, plan: Plan | None, interpret: bool
) -> tuple[tuple, tuple, Refs | None]:
    """(the product's own operands, its own results, the adapters' refs) of a kernel called as `with_adapters` says."""
    if plan is None:
        return refs[:given], refs[given:], None
    end = given + 6 + results
    a, b, slot_ids, items, layer, _ = refs[given : given + 6]
    counters, sums, operand = refs[end:]
    adapters = Refs(a, b, slot_ids, items, layer, sums, operand, counters, plan, interpret)
    return refs[:given], refs[end - results : end], adapters


def run(
    x, refs: Refs, tiles: int, parts: int, product: Callable[..., None], expand_tile: Callable[..., None] | None
) -> None:
    """A kernel's body, in the grid of `with_adapters`: shrinks, or product(tile, part), or expand_tile(tile)."""
    pid = pl.program_id(0)
    begin, end = refs.plan.shrinkers, refs.plan.shrinkers + tiles * parts
    pl.when(pid < begin)(lambda: _shrink(x, refs, pid))
    pl.when((pid >= begin) & (pid < end))(lambda: product(lax.rem(pid - begin, tiles), lax.div(pid - begin, tiles)))
    if expand_tile is not None:
        pl.when(pid >= end)(lambda: expand_tile(pid - end))


# ---- 3. in a kernel --------------------------------------------------------------------------------------------------
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
    slot, first_rank, ranks = (refs.field(i, j) for i in range(3))
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


def _halves(h, operand) -> list[jax.Array]:
    """h in the operand's dtype, and with fewer bits than float32 what that leaves of it."""
    high = h.astype(operand.dtype)
    return [high, (h - high.astype(jnp.float32)).astype(operand.dtype)][: operand.shape[1]]


def _put_operand(h, refs: Refs, j, count) -> None:
    """h [padded T, width] of item j, and zeros after the last item to the end of its chunk."""
    plan, operand = refs.plan, refs.operand
    row, column = positions(h.shape)
    at_slice, r = lax.div(column, ITEM), lax.rem(column, ITEM)
    inside = at_slice < len(plan.slices)
    halves = _halves(h, operand)

    def put(q: int, columns, value, mask) -> None:
        plgpu.store(operand.at[at_slice, full(q, h.shape), row, columns], value, mask=mask)

    for q, value in enumerate(halves):
        put(q, j * ITEM + r, value, inside)

    @pl.when(j == count - 1)
    def _():
        end = pl.cdiv(count * ITEM, plan.tiles.chunk) * plan.tiles.chunk
        for i in range(1, plan.tiles.chunk // ITEM):
            columns = (j + i) * ITEM + r
            for q in range(len(halves)):
                put(q, columns, jnp.zeros_like(halves[q]), inside & (columns < end))


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


def expand_alone(starts: tuple, block_n: int, refs: Refs) -> tuple[jax.Array, ...]:
    """`expand` of zeros."""
    zeros = jnp.zeros((refs.plan.padded, block_n), jnp.float32)
    return expand(tuple(zeros for _ in starts), starts, refs)


def expand(sums: tuple, starts: tuple, refs: Refs) -> tuple[jax.Array, ...]:
    """sums + h @ B: float32 [padded T, columns] each, for the columns from each of `starts` on."""
    plan = refs.plan
    block_n, chunk, count = sums[0].shape[1], plan.tiles.chunk, refs.count()
    finished = _finished(refs)
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
            for h in _h(refs, at_slice, column0):
                total = total + dot(h, b_rn)
            out.append(total)
        return tuple(out)

    sums = lax.fori_loop(0, pl.cdiv(count * ITEM, chunk), body, sums)
    return tuple(jnp.where(finished, total, jnp.nan) for total in sums)
