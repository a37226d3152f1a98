"""silu(x @ gate) * (x @ up) of few rows as one kernel: both products of a column, and what is made of them.

Decode products are bound by reading the matrix. One program reads a tile of gate's columns and the same tile of up's, so the
products themselves are never stored. Letters: R rows, K inputs, F outputs.
Source: Shazeer, "GLU variants improve Transformer", 2020.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .deferred_norm import Normed, inverse_of
from .skinny_matmul import accumulate, check_product, operands, padded_rows, plain_product, positions
from .tuning import swiglu_tiles


# ---- 1. the public op ------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def swiglu(x: Normed, w: jax.Array, *, implementation: str = "triton", interpret: bool = False) -> jax.Array:
    """silu(x @ w[:, :F]) * (x @ w[:, F:]) [R, F] in x's dtype, to which gate, silu(gate) and up are rounded too.

    x [R, K], an array or a `DeferredNorm`, and w [K, 2F] of one dtype; R, K and F as `fits` says.
    A row's bits do not depend on the other rows. Raises: ValueError naming the operand.
    """
    layout.check_implementation("swiglu", implementation)
    if w.shape[-1] % 2:
        raise ValueError(f"swiglu: w must hold gate and up side by side, got {w.shape}")
    check_product("swiglu", x, w, w.shape[-1] // 2)
    if implementation == "triton":
        return _triton(x, w, interpret=interpret)
    gate, up = jnp.split(plain_product(x, w), 2, -1)
    return _activated(gate, up, w.dtype)


def _activated(gate: jax.Array, up: jax.Array, dtype) -> jax.Array:
    gate = gate.astype(dtype).astype(jnp.float32)
    return (gate * jax.nn.sigmoid(gate)).astype(dtype) * up.astype(dtype)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(*refs, block_n: int, block_k: int, eps: float | None):
    """Program (column tile): all rows times one tile of gate's columns and the same tile of up's.

    refs: x [R, K], with eps squares [B, R], w [K, 2F]; out [R, F].
    """
    x, w, out = refs[0], refs[-2], refs[-1]
    start, (rows, width) = pl.program_id(0) * block_n, out.shape
    inverse = None if eps is None else inverse_of(refs[1], x.shape[1], eps, padded_rows(rows))
    gate, up = accumulate(x, w, (start, width + start), 0, x.shape[1] // block_k, block_n, block_k)
    if inverse is not None:
        gate, up = gate * inverse, up * inverse
    row, column = positions(gate.shape, start)
    plgpu.store(out.at[row, column], _activated(gate, up, out.dtype), mask=row < rows)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(x: Normed, w: jax.Array, *, interpret: bool) -> jax.Array:
    given, eps = operands(x)
    rows, outputs = given[0].shape[0], w.shape[1] // 2
    tiles = swiglu_tiles(w.dtype.itemsize)
    return pl.pallas_call(
        functools.partial(_kernel, block_n=tiles.block_n, block_k=tiles.block_k, eps=eps),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), w.dtype),
        grid=(outputs // tiles.block_n,),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="swiglu",
        interpret=interpret,
    )(*given, w)
