"""A product of few rows with a large matrix, split along K, that leaves its partial sums to the kernel that follows.

Decode products are bound by reading the matrix. Splitting K keeps every multiprocessor reading; summing the parts in the next
kernel, which reads the result anyway, saves a launch. Letters: R rows, K inputs, N outputs, S parts of K.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .tuning import matmul_tiles

MAX_ROWS = 64


# ---- 1. the public op ------------------------------------------------------------------------------------------------
def fits(rows: int, inputs: int, outputs: int) -> bool:
    """Whether `skinny_matmul` takes a product of these sizes."""
    return rows <= MAX_ROWS and inputs % 64 == 0 and outputs % 64 == 0


@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def skinny_matmul(x: jax.Array, w: jax.Array, *, implementation: str = "triton", interpret: bool = False) -> jax.Array:
    """x [R, K] @ w [K, N] as partial sums, float32 [S, R, N]: the product is their sum over S.

    x and w of one dtype; R, K, N as `fits` says; S follows from the shapes.
    A row's bits do not depend on the other rows. Raises: ValueError naming the operand.
    """
    layout.check_implementation("skinny_matmul", implementation)
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"skinny_matmul: needs x [R, K] and w [K, N], got {x.shape} and {w.shape}")
    if x.dtype != w.dtype:
        raise ValueError(f"skinny_matmul: w must have the dtype of x ({x.dtype}), got {w.dtype}")
    if not fits(x.shape[0], *w.shape):
        raise ValueError(
            f"skinny_matmul: at most {MAX_ROWS} rows, K and N multiples of 64, got x {x.shape} and w {w.shape}"
        )
    if implementation == "xla":
        return jnp.dot(x, w, preferred_element_type=jnp.float32)[None]
    return _triton(x, w, interpret=interpret)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(
    x,  # [R, K]
    w,  # [K, N]
    out,  # [S, R, N] float32
    *,
    block_n: int,
    block_k: int,
):
    """Program (column tile, part): all rows times one tile of columns, over one part of K."""
    n, s = pl.program_id(0), pl.program_id(1)
    rows, steps = x.shape[0], x.shape[1] // out.shape[0] // block_k
    padded = max(16, 1 << (rows - 1).bit_length())
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    row_mk = lax.broadcasted_iota(jnp.int32, (padded, block_k), 0)
    col_mk = lax.broadcasted_iota(jnp.int32, (padded, block_k), 1)

    def body(i, acc):
        k0 = (s * steps + i) * block_k
        x_mk = plgpu.load(x.at[row_mk, k0 + col_mk], mask=row_mk < rows, other=0)
        w_kn = w[pl.ds(k0, block_k), pl.ds(n * block_n, block_n)]
        return acc + jnp.dot(x_mk, w_kn, precision=precision, preferred_element_type=jnp.float32)

    acc = lax.fori_loop(0, steps, body, jnp.zeros((padded, block_n), jnp.float32))
    row_mn = lax.broadcasted_iota(jnp.int32, acc.shape, 0)
    col_mn = lax.broadcasted_iota(jnp.int32, acc.shape, 1) + n * block_n
    plgpu.store(out.at[jnp.full(acc.shape, s), row_mn, col_mn], acc, mask=row_mn < rows)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(x: jax.Array, w: jax.Array, *, interpret: bool) -> jax.Array:
    (rows, inputs), outputs = x.shape, w.shape[1]
    tiles = matmul_tiles(rows, inputs, outputs, x.dtype.itemsize)
    return pl.pallas_call(
        functools.partial(_kernel, block_n=tiles.block_n, block_k=tiles.block_k),
        out_shape=jax.ShapeDtypeStruct((tiles.parts, rows, outputs), jnp.float32),
        grid=(outputs // tiles.block_n, tiles.parts),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="skinny_matmul",
        interpret=interpret,
    )(x, w)
