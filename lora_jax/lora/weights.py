"""Adapter weights on their way to a device slot: host arrays in the stacks' layout, and the write itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config import LoRAConfig
from .adapter import Adapter, TargetSpec
from .sites import GroupShape

Stacks = dict[str, tuple[jax.Array, ...]]
PlaceArrays = dict[str, tuple[np.ndarray, np.ndarray]]
PLACES = "places"  # beside the groups' names


def stack_avals(groups: Mapping[str, GroupShape], config: LoRAConfig, dtype, sharding) -> dict:
    """Shapes of every group's (A, B), and where slots have several places of (which they are,)."""
    like = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    places, rank = config.num_places, config.place_rank
    out = {name: tuple(like(s, dtype) for s in shape.shapes(places, rank)) for name, shape in groups.items()}
    if config.places_of_slot > 1:
        out[PLACES] = (like((config.max_loras, config.places_of_slot), np.int32),)
    return out


def place_avals(stacks: Mapping[str, tuple], make: Callable) -> dict:
    """Shapes of one place's arrays. make(shape, dtype)."""
    one = {name: tuple(make((s.shape[0], 1, *s.shape[2:]), s.dtype) for s in ab) for name, ab in stacks.items()}
    one.pop(PLACES, None)
    return one


def place_arrays(
    adapter: Adapter,
    targets: Mapping[str, TargetSpec],
    groups: Mapping[str, GroupShape],
    rank: int,
    piece: int,
    dtype,
) -> PlaceArrays:
    """A and B of the piece-th `rank` ranks for every group, [layers, 1, ...], absent modules and ranks zero. dtype: what the
    adapter was read for."""
    out: PlaceArrays = {}
    for name, shape in groups.items():
        a, b = shape.shapes(1, rank)
        out[name] = (np.zeros(a, dtype), np.zeros(b, dtype))
    ranks = slice(piece * rank, (piece + 1) * rank)
    for module, weights in adapter.modules.items():
        if weights.rank <= ranks.start:
            continue
        spec = targets[module]
        shape, (a, b) = groups[spec.group], out[spec.group]
        own_a, own_b = weights.a[ranks], weights.b[ranks]
        assert own_a.dtype == own_b.dtype == dtype, f"{module} of {own_a.dtype} for slots of {dtype}"
        r, start = len(own_a), sum(shape.slices[: spec.slice])
        b[spec.layer, 0, :r, start : start + spec.out_features] = own_b
        if shape.kind == "embedding":
            a[spec.layer, 0, :, :r] = own_a.T
        else:
            a[spec.layer, 0, spec.slice * rank : spec.slice * rank + r] = own_a
    return out


def write_place(stacks: Stacks, where: jax.Array, arrays: dict) -> Stacks:
    """Replace everything in one place. where int32 [3]: the place, the slot that it is of, which of the slot's it is, the first
    one first; arrays as from `place_arrays`. `stacks` is donated when jitted."""
    place, slot, piece = where
    zero = np.int32(0)
    put = lambda s, new: lax.dynamic_update_slice(s, new, (zero, place) + (zero,) * (s.ndim - 2))  # noqa: E731
    out = {name: jax.tree.map(put, stacks[name], new) for name, new in arrays.items()}
    if PLACES in stacks:
        (table,) = stacks[PLACES]
        before = jnp.where(piece == 0, -1, table[slot])  # an adapter begins: what the slot had is gone
        out[PLACES] = (table.at[slot].set(jnp.where(jnp.arange(table.shape[1]) == piece, place, before)),)
    return out
