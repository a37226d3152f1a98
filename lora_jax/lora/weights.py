"""Adapter weights on their way to a device slot: host arrays in the stacks' layout, and the write itself."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax import lax

from .adapter import Adapter, TargetSpec, folded_b, rounded_a
from .sites import GroupShape

Stacks = dict[str, tuple[jax.Array, jax.Array]]
SlotArrays = dict[str, tuple[np.ndarray, np.ndarray]]


def stack_avals(groups: Mapping[str, GroupShape], slots: int, rank: int, dtype, sharding) -> dict:
    """Shapes of every group's (A, B)."""
    return {
        name: tuple(jax.ShapeDtypeStruct(s, dtype, sharding=sharding) for s in shape.shapes(slots, rank))
        for name, shape in groups.items()
    }


def slot_arrays(
    adapter: Adapter, targets: Mapping[str, TargetSpec], groups: Mapping[str, GroupShape], rank: int, dtype
) -> SlotArrays:
    """One slot's A and B for every group, [layers, 1, ...], absent modules and padded ranks zero, scale folded into B."""
    out: SlotArrays = {}
    for name, shape in groups.items():
        a, b = shape.shapes(1, rank)
        out[name] = (np.zeros(a, dtype), np.zeros(b, dtype))
    for module, weights in adapter.modules.items():
        spec = targets[module]
        shape, (a, b) = groups[spec.group], out[spec.group]
        r = weights.a.shape[0]
        start = sum(shape.slices[: spec.slice])
        b[spec.layer, 0, :r, start : start + spec.out_features] = folded_b(weights, dtype).T
        if shape.kind == "embedding":
            a[spec.layer, 0, :, :r] = rounded_a(weights, dtype).T
        else:
            a[spec.layer, 0, spec.slice * rank : spec.slice * rank + r] = rounded_a(weights, dtype)
    return out


def write_slot(stacks: Stacks, slot: jax.Array, arrays: dict) -> Stacks:
    """Replace everything in one slot. slot int32 scalar; arrays as from `slot_arrays`. `stacks` is donated when jitted."""
    zero = np.int32(0)
    return jax.tree.map(
        lambda s, new: lax.dynamic_update_slice(s, new, (zero, slot) + (zero,) * (s.ndim - 2)), stacks, arrays
    )
