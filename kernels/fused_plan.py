"""How adapters inside a product of few rows are cut into programs, and what a kernel sees of them (`fused_lora`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .adapters import LINE, Adapters
from .in_kernel import full, halves, padded_rows
from .lora_items import COUNT, FIELDS, FIRST, ITEM, SLOT
from .tuning import FEW_ITEMS, LoRATiles, lora_tiles

DENSE_ROWS = 16  # up to which reading the zeros of all items costs less than finding a row's own


class Plan(NamedTuple):
    """Static. padded: rows of a tile. room: J."""

    slices: tuple[int, ...]
    linear: int
    padded: int
    room: int
    rank: int
    tiles: LoRATiles

    @property
    def shrinkers(self) -> int:
        return self.tiles.groups * self.tiles.parts

    @property
    def joined(self) -> bool:
        """Whether the last program to come adds the parts of h up, rather than all that read them."""
        return self.tiles.joined

    @property
    def passes(self) -> int:
        """At most."""
        return layout.cdiv(self.room, self.tiles.items)

    @property
    def dense(self) -> bool:
        """Whether joined h is [T, J * ITEM], zeros where a row has another adapter, rather than each row's own."""
        return self.joined and (self.padded <= DENSE_ROWS or self.rank > ITEM)

    @property
    def late(self) -> bool:
        """Whether h, of many rows and items, is there only when half of a large product is done."""
        return self.padded > 16 and self.room > FEW_ITEMS

    @property
    def pieces(self) -> int:
        """Of up to ITEM rank rows of one slice, in a pass: as many as tensor cores take, some of them of no item."""
        return 1 << (self.tiles.items * len(self.slices) - 1).bit_length()


def item_field(items, linear: int, field: int, j, mask=None) -> jax.Array:
    """In a kernel: a field of one item j, or of an array of them."""
    at = items.shape[1] // FIELDS * (ITEM + field) + j
    if jnp.ndim(j) == 0:
        return items[linear, at]
    return plgpu.load(items.at[full(linear, j.shape), at], mask=mask, other=None if mask is None else 0)


class Refs(NamedTuple):
    """What a kernel sees of the adapters; h is scratch."""

    a: Any
    b: Any  # [L, P * Q, N]
    slot_ids: Any
    items: Any
    layer: Any
    h: Any  # [P, n * T, max(16, R)] float32: parts of x @ A^T of each row's own adapter, else anything
    joined: Any  # [H, n * T, max(16, R), or J * 16 if Plan.dense], if Plan.joined: their sums, in halves
    counters: Any
    plan: Plan
    interpret: bool

    def field(self, i: int, j, mask=None) -> jax.Array:
        """Of item j: its slot (0), first rank row (1), rank rows (2)."""
        return item_field(self.items, self.plan.linear, i, j, mask)

    @property
    def place(self) -> int:
        """Q"""
        return self.a.shape[2] // len(self.plan.slices)

    def count(self) -> jax.Array:
        return self.field(COUNT, 0)

    def counter(self, which):
        """Of a pass: its parts that are done."""
        return self.counters.shape[0] - 1 - which

    def flag(self):
        """Counts what is there of h, for this linear in this layer."""
        number = self.layer[0] * self.items.shape[0] + self.plan.linear
        return self.counters.shape[0] - self.plan.room - (number + 1) * LINE

    def own(self, at_slice, j, inside) -> tuple[tuple, jax.Array]:
        """(where h lies, whether it is there) of a slice's item j in each row, for j, at_slice and inside [Q]:
        [padded T, Q, ITEM]."""
        rows, shape = self.slot_ids.shape[0], (self.plan.padded, j.shape[0], ITEM)
        row, r = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 2))
        t = lax.iota(jnp.int32, shape[0])
        ids = plgpu.load(self.slot_ids.at[t], mask=t < rows, other=-1)
        slot, first = (self.field(i, j, inside) for i in (SLOT, FIRST))
        own = (ids[:, None] == slot[None]) & inside[None]
        wide = lambda v: jnp.broadcast_to(v[None, :, None], shape)  # noqa: E731
        first = lax.div(first, ITEM) * ITEM  # so that a compiler sees that it is a multiple
        return (wide(at_slice * rows) + row, wide(first) + r), jnp.broadcast_to(own[:, :, None], shape)

    def listed(self, at_slice, j, inside) -> tuple[tuple, jax.Array]:
        """As `own`, in joined h that is dense: all rows of each item."""
        rows, shape = self.slot_ids.shape[0], (self.plan.padded, j.shape[0], ITEM)
        row, r = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 2))
        wide = lambda v: jnp.broadcast_to(v[None, :, None], shape)  # noqa: E731
        return (wide(at_slice * rows) + row, wide(j * ITEM) + r), wide(inside) & (row < rows)

    def apart(self, at: tuple, there) -> tuple:
        """Interpreted, lanes that are masked store what they find, over what others store: they get a row of their own."""
        return (jnp.where(there, at[0], self.h.shape[1] - 1), at[1]) if self.interpret else at


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
    expanded: int,
    block_n: int,
    interpret: bool,
) -> Call:
    """given and grid: of the product alone, in tiles of block_n columns. expanded: tiles that programs of their own expand, 0
    where the product's do.
    Raises: ValueError for tiles, which may be stored ones, that would reach over a slice."""
    if adapters is None:
        return Call(given, (), grid, None)
    assert arrivals is not None
    if any(width % block_n for width in adapters.slices):
        raise ValueError(f"adapters: slices {adapters.slices} are no multiples of a tile of {block_n} columns")
    (layers, places, place, outputs), dtype = adapters.b.shape, adapters.a.dtype
    rank = adapters.rank
    rows, inputs, n = adapters.slot_ids.shape[0], adapters.a.shape[3], len(adapters.slices)
    room, padded = adapters.items.shape[1] // FIELDS, padded_rows(rows)
    columns = block_n * (1 if expanded else n)
    tiles = lora_tiles(rows, inputs, n, room, rank, dtype.itemsize, columns, waits=expanded > 0)
    plan = Plan(adapters.slices, adapters.linear, padded, room, rank, tiles)
    assert tiles.joined or rank <= ITEM, "h of several items a row, to be found by each program that reads it"
    b = adapters.b.reshape(layers, places * place, outputs)
    more = (adapters.a, b, adapters.slot_ids, adapters.items, adapters.layer.reshape(1), arrivals)
    like = jax.ShapeDtypeStruct
    results = [like(arrivals.shape, arrivals.dtype)]
    results.append(like((tiles.parts, n * rows + interpret, max(ITEM, rank)), jnp.float32))
    if tiles.joined:
        results.append(
            like((halves(dtype), n * rows + interpret, room * ITEM if plan.dense else max(ITEM, rank)), dtype)
        )
    assert expanded or not tiles.spread, "a product that waits for programs behind it"
    programs = plan.shrinkers + grid[0] * grid[1] + expanded
    return Call((*given, *more), tuple(results), (programs,), plan)


def split_refs(
    refs: tuple, given: int, results: int, plan: Plan | None, interpret: bool
) -> tuple[tuple, tuple, Refs | None]:
    """(the product's own operands, its own results, the adapters' refs) of a kernel called as `with_adapters` says."""
    if plan is None:
        return refs[:given], refs[given:], None
    end = given + 6 + results
    a, b, slot_ids, items, layer, _ = refs[given : given + 6]
    counters, *h = refs[end:]
    adapters = Refs(a, b, slot_ids, items, layer, h[0], h[-1], counters, plan, interpret)
    return refs[:given], refs[end - results : end], adapters
