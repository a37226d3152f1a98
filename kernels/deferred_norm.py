"""An RMSNorm whose division is left to the product that reads it.

A product of few rows ends in many programs, none of which sees a whole row. Each can still scale its columns and sum their
squares; the next product divides its own result by the root mean square, for x / rms(x) * scale @ w = (x * scale @ w) / rms(x).
Letters: R rows, D features, B blocks of columns. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scaled", "squares"], meta_fields=["eps"])
@dataclass(frozen=True)
class DeferredNorm:
    """scaled [R, D] = x * scale in x's dtype; squares float32 [B, R], whose sum over B is that of the squares of x's row."""

    scaled: jax.Array
    squares: jax.Array
    eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the norm: [R, D]."""
        return self.scaled.shape

    def inverse(self) -> jax.Array:
        """1 / rms(x), float32 [R, 1]."""
        mean = jnp.sum(self.squares, axis=0) / self.scaled.shape[1]
        return lax.rsqrt(mean + self.eps)[:, None]

    def normed(self) -> jax.Array:
        """x / rms(x) * scale, [R, D] in x's dtype."""
        return (self.scaled.astype(jnp.float32) * self.inverse()).astype(self.scaled.dtype)


Normed = jax.Array | DeferredNorm
"""What a norm gives to the linears after it: [R, D], or that with the division still to be done."""


def inverse_of(squares, size: int, eps: float, padded: int) -> jax.Array:
    """In a kernel: 1 / rms of all rows, float32 [padded R, 1], from squares [B, R] of rows of that size."""
    blocks, rows = squares.shape
    shape = (1 << (blocks - 1).bit_length(), padded)
    block, row = (lax.broadcasted_iota(jnp.int32, shape, i) for i in range(2))
    found = plgpu.load(squares.at[block, row], mask=(block < blocks) & (row < rows), other=0)
    return lax.rsqrt(jnp.sum(found, axis=0) / size + eps)[:, None]
