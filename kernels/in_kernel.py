"""Small things that several kernels say. All but `padded_rows` and `halves` are for use inside kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def padded_rows(rows: int) -> int:
    """Rows of a tile that tensor cores take."""
    return max(16, 1 << (rows - 1).bit_length())


def halves(dtype) -> int:
    """Operands that `split` makes of a float32 array."""
    return 2 if dtype.itemsize < 4 else 1


def split(h, dtype) -> list[jax.Array]:
    """float32 h in a dtype, and with fewer bits than float32 what that leaves of it."""
    high = h.astype(dtype)
    return [high, (h - high.astype(jnp.float32)).astype(dtype)][: halves(dtype)]


def full(x, shape: tuple[int, ...]) -> jax.Array:
    """int32 [shape] of x. Index arrays throughout: interpret mode knows no mixture of arrays and slices."""
    return jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape)


def positions(shape: tuple[int, ...], start: Any = 0) -> tuple[jax.Array, jax.Array]:
    """Rows and columns of a tile whose first column is `start`."""
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1) + start


def pick(values: jax.Array, i) -> jax.Array:
    """values[i] of an integer array in registers, 0 beyond its end. What tells a pipelined loop where to load next must not be
    loaded in that loop, which would wait for it in every step."""
    return jnp.sum(jnp.where(lax.iota(jnp.int32, values.shape[0]) == i, values, 0))


def dot(a, b) -> jax.Array:
    """a @ b of one dtype in float32, on tensor cores unless they are float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def silu_mul(gate: jax.Array, up: jax.Array, dtype) -> jax.Array:
    """silu(gate) * up of float32, with gate, silu(gate) and up rounded to dtype."""
    gate = gate.astype(dtype).astype(jnp.float32)
    return (gate * jax.nn.sigmoid(gate)).astype(dtype) * up.astype(dtype)
