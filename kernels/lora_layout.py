"""How LoRA weights lie on the device, and the helpers that both kernels share.

A [L, S, n*R, K]: the rank rows of slice i are rows i*R to (i+1)*R. B [L, S, R, N]: the columns of slice i follow those of
slice i-1. R is a power of two; the rows above an adapter's own rank are zeros. T tokens, K inputs, N outputs, L layers,
S slots, n slices.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MIN_RANK = 8
MAX_RANK = 256
MIN_COMPUTE_CAPABILITY = (8, 0)  # Pallas-Triton supports no older card
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
IMPLEMENTATIONS = ("triton", "xla")

# The backend still works in every jax that this package allows; the upper bound on jax is where that is checked again.
warnings.filterwarnings("ignore", message=r"The Pallas Triton backend is deprecated", category=DeprecationWarning)


def padded_rank(rank: int) -> int:
    """Rank rows allocated for adapters of up to `rank`: the next power of two, at least MIN_RANK.

    Raises: ValueError unless 1 <= rank <= MAX_RANK.
    """
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"rank must be in [1, {MAX_RANK}], got {rank}")
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def slice_offsets(slices: Sequence[int]) -> tuple[int, ...]:
    """First output column of each slice."""
    return (0, *itertools.accumulate(slices[:-1]))


def slice_of(column: jax.Array, slices: Sequence[int]) -> jax.Array:
    """In a kernel: the slice that an output column lies in."""
    return functools.reduce(
        jnp.add, [jnp.int32(0), *((column >= o).astype(jnp.int32) for o in slice_offsets(slices)[1:])]
    )


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def check_implementation(op: str, implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")


def check_rows(op: str, rows: int, slot_ids: Any, layer: Any) -> jax.Array:
    """Checks slot_ids int32 [T] and layer int32 scalar; returns layer as an array, so that it is an operand."""
    if rows < 1:
        raise ValueError(f"{op}: needs at least one row")
    if slot_ids.shape != (rows,) or slot_ids.dtype != jnp.int32:
        raise ValueError(f"{op}: slot_ids must be int32 [{rows}], got {slot_ids.dtype} {list(slot_ids.shape)}")
    layer = jnp.asarray(layer)
    if layer.shape != () or layer.dtype != jnp.int32:
        raise ValueError(f"{op}: layer must be an int32 scalar, got {layer.dtype} {list(layer.shape)}")
    return layer


def check_dtype(op: str, name: str, dtype: Any) -> None:
    if jnp.dtype(dtype) not in DTYPES:
        raise ValueError(f"{op}: {name} must be one of {', '.join(d.name for d in DTYPES)}, got {jnp.dtype(dtype)}")


# The plain-JAX forms gather each row's own weights when that is little work, and otherwise loop over the slots in use.
# In both, a row's bits depend on its own weights alone: not on other rows, and not on which slot holds the adapter.
GATHER_ROWS = 2  # a gather reads every row's weights anew, the loop each slot's once
GATHER_BYTES = 256 << 20


def gathers(rows: int, weights: jax.Array) -> bool:
    """Whether the plain-JAX form gathers weights [L, S, ., .] for each row, rather than looping over slots."""
    slots, d0, d1 = weights.shape[1:]
    return rows <= GATHER_ROWS and rows * d0 * d1 * weights.dtype.itemsize <= GATHER_BYTES


def gather_rows(weights: jax.Array, slot_ids: jax.Array, layer: jax.Array) -> jax.Array:
    """weights [L, S, d0, d1] -> [T, d0, d1], each row its own slot's; rows of slot -1 get slot 0's, to be ignored."""
    return weights.at[layer, slot_ids].get(mode="clip")


def for_each_slot(slot_ids: jax.Array, weights: jax.Array, layer: jax.Array, product, init: jax.Array) -> jax.Array:
    """init [T, c], with the rows of each slot in use replaced by `product(weights[layer, slot])` [T, c]."""
    end = jnp.int32(weights.shape[1])
    _, _, *dims = weights.shape

    def following(slot):
        return jnp.min(jnp.where(slot_ids > slot, slot_ids, end))

    def body(carry):
        slot, out = carry
        start = (layer, slot, jnp.int32(0), jnp.int32(0))
        own = lax.dynamic_slice(weights, start, (1, 1, *dims)).reshape(dims)
        return following(slot), jnp.where((slot_ids == slot)[:, None], product(own), out)

    return lax.while_loop(lambda carry: carry[0] < end, body, (following(jnp.int32(-1)), init))[1]
