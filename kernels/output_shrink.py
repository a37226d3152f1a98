"""The shrink of the linear that reads attention's output, inside attention: that linear's kernel then begins with h.

A program of attention has all values of its heads, and a row of rank rows is short: each program multiplies what it stores with
its part of A, of its row's own adapter. Nobody waits for anybody: the parts are whole when the next kernel begins.
Letters: R rows, C programs a row (KV heads), H query heads, D head size, Q rank rows as tensor cores take them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .adapters import Adapters, begun_shape, check_items
from .fused_plan import item_field
from .in_kernel import full
from .lora_items import COUNT, FIELDS, FIRST, ITEM, RANKS, SLOT
from .lora_shrink import lora_shrink
from .places import check_places, pieces

MOST_ROWS = 16  # with more, reading A and h anew for each costs more than it saves (docs/performance.md)
MOST_RANK = 64  # a program holds all of them


def takes_shrink(rows: int, rank: int) -> bool:
    """Whether attention shrinks for so many rows and that padded rank."""
    return rows <= MOST_ROWS and rank <= MOST_RANK


def given(adapters: Adapters) -> tuple[jax.Array, ...]:
    """What a kernel needs beside its own operands, as `Shrink` takes it."""
    return adapters.a, adapters.slot_ids, adapters.items, adapters.layer.reshape(1)


class Shrink(NamedTuple):
    """In a kernel. a [L, P, Q, H * D]; out [C, T, R as tensor cores take it] float32. ranks: R."""

    a: Any
    slot_ids: Any
    items: Any
    layer: Any
    out: Any
    linear: int
    ranks: int

    def of(self, row) -> tuple[jax.Array, jax.Array]:
        """(the rows of B of a row's adapter [R], its rank, 0: none)."""
        slot, count = self.slot_ids[row], item_field(self.items, self.linear, COUNT, 0)
        j = lax.iota(jnp.int32, 1 << (self.items.shape[1] // FIELDS - 1).bit_length())
        own = (j < count) & (slot >= 0)
        slots, first, ranks = (item_field(self.items, self.linear, i, j, mask=own) for i in (SLOT, FIRST, RANKS))
        mine = own & (slots == slot) & (ranks > 0)
        rank = jnp.max(jnp.where(mine, first + ranks, 0))
        r = lax.iota(jnp.int32, self.out.shape[2])
        if self.ranks <= self.a.shape[2]:
            return slot * self.a.shape[2] + r, rank
        item = jnp.zeros(r.shape, jnp.int32)
        for i in range(self.ranks // ITEM):
            of_piece = jnp.max(jnp.where(mine & (first == i * ITEM), j, 0))
            item = jnp.where(lax.div(r, ITEM) == i, of_piece, item)
        at = item * ITEM + lax.rem(r, ITEM)
        return plgpu.load(self.items.at[full(self.linear, r.shape), at], mask=r < rank, other=0), rank

    def load(self, b_row, rank, start, dim, size: int) -> jax.Array:
        """A of an adapter for the columns start + dim [D padded], of which `size` count: [R, D padded]."""
        shape = (self.out.shape[2], dim.shape[0])
        r, d = lax.broadcasted_iota(jnp.int32, shape, 0), jnp.broadcast_to(dim[None], shape)
        place = lax.div(b_row, self.a.shape[2])
        wide = lambda v: jnp.broadcast_to(v[:, None], shape)  # noqa: E731
        at = (full(self.layer[0], shape), wide(place), wide(b_row - place * self.a.shape[2]), start + d)
        return plgpu.load(self.a.at[at], mask=(r < rank) & (d < size), other=0)

    def store(self, head, row, rank, h) -> None:
        """h [R] float32, zeros from the rank on: all of it is read."""
        r = lax.iota(jnp.int32, h.shape[0])
        plgpu.store(self.out.at[full(head, r.shape), full(row, r.shape), r], h, mask=full(rank, r.shape) > 0)


def product(a, x) -> jax.Array:
    """a [R, D], x [D] of one dtype: float32 [R]."""
    return jnp.sum(a.astype(jnp.float32) * x.astype(jnp.float32)[None], axis=1)


def plain_shrink(x: jax.Array, adapters: Adapters, programs: int) -> jax.Array:
    """In plain JAX: parts as programs leave them, of which the first is all."""
    own = pieces(adapters.slot_ids, adapters.places)
    shrunk = [lora_shrink(x, adapters.a, ids, adapters.layer, implementation="xla")[0] for ids in own]
    h = jnp.concatenate(shrunk, axis=1)
    return jnp.zeros(begun_shape(adapters, programs), jnp.float32).at[0, :, : h.shape[1]].set(h)


def check_shrink(op: str, adapters: Adapters, rows: int, size: int, dtype: Any) -> None:
    """Raises: ValueError naming the operand."""
    a = adapters.a
    if len(adapters.slices) != 1 or a.ndim != 4 or a.shape[3] != size or a.dtype != dtype:
        raise ValueError(f"{op}: a must be {dtype} [L, S, R, {size}], got {a.dtype} {a.shape}")
    if not takes_shrink(rows, adapters.rank):
        raise ValueError(
            f"{op}: at most {MOST_ROWS} rows and rank {MOST_RANK}, got {rows} rows and rank {adapters.rank}"
        )
    if adapters.b.ndim != 4 or adapters.b.shape[:3] != a.shape[:3]:
        raise ValueError(f"{op}: b must be [L, S, R, N] of a {a.shape}, got {adapters.b.shape}")
    layout.check_rows(op, rows, adapters.slot_ids, adapters.layer)
    check_places(op, adapters.places, adapters.b.shape[2], ITEM)
    check_items(op, adapters)
