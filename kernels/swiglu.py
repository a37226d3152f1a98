"""silu(x @ gate) * (x @ up) of few rows as one kernel: both products of a column, and what is made of them.

Decode products are bound by reading the matrix. One program reads a tile of gate's columns and the same tile of up's, so the
products themselves are never stored. Letters: R rows, K inputs, F outputs.
Source: Shazeer, "GLU variants improve Transformer", 2020.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import fused_lora as lora
from . import lora_layout as layout
from .adapters import Adapters, check_adapters
from .deferred_norm import Normed, inverse_of
from .fused_plan import Plan, split_refs, with_adapters
from .in_kernel import padded_rows, positions, silu_mul
from .skinny_matmul import accumulate, check_product, operands, plain_product
from .tuning import swiglu_tiles

TOGETHER = 16  # column tiles


# ---- 1. the public op ------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def swiglu(x: Normed, w: jax.Array, *, implementation: str = "triton", interpret: bool = False) -> jax.Array:
    """silu(x @ w[:, :F]) * (x @ w[:, F:]) [R, F] in x's dtype, to which gate, silu(gate) and up are rounded too.

    x [R, K], an array or a `DeferredNorm`, and w [K, 2F] of one dtype; R, K and F as `fits` says.
    A row's bits do not depend on the other rows. Raises: ValueError naming the operand.
    """
    _check("swiglu", x, w, implementation)
    return _swiglu(x, w, None, None, implementation, interpret)[0]


@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def lora_swiglu(
    x: Normed,
    w: jax.Array,
    adapters: Adapters,
    arrivals: jax.Array,
    *,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(`swiglu` with each row's own adapter on gate and up, arrivals for the step's next call).

    adapters: of x @ w, slices (F, F), R rows; arrivals: of `new_arrivals`, `adapter_counters` at least and new in every step,
    donated by the caller or copied. A row's bits do not depend on the other rows, nor on which slots are in use.
    Raises: ValueError naming the operand.
    """
    _check("lora_swiglu", x, w, implementation)
    (inputs, outputs), rows = w.shape, x.shape[0]
    check_adapters("lora_swiglu", adapters, arrivals, rows, inputs, outputs, w.dtype)
    return _swiglu(x, w, adapters, arrivals, implementation, interpret)


def _check(op: str, x: Normed, w: jax.Array, implementation: str) -> None:
    layout.check_implementation(op, implementation)
    if w.shape[-1] % 2:
        raise ValueError(f"{op}: w must hold gate and up side by side, got {w.shape}")
    check_product(op, x, w, w.shape[-1] // 2)


def _swiglu(
    x: Normed, w: jax.Array, adapters: Adapters | None, arrivals: Any, implementation: str, interpret: bool
) -> tuple[jax.Array, Any]:
    if implementation == "triton":
        return _triton(x, w, adapters, arrivals, interpret=interpret)
    gate, up = jnp.split(plain_product(x, w, adapters), 2, -1)
    return silu_mul(gate, up, w.dtype), arrivals


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _pause(steps: int, n, tiles: int, late: bool):
    """After how many of its steps column tile n adds the adapters: in the middle of its work, where waiting leaves memory to
    the others, and not when all others do, but when its neighbours do: they read the same rows of memory. late: in its second
    half, since h takes that long."""
    first, span = (7 * steps // 16, steps // 2) if late else (3 * steps // 16, 3 * steps // 4)
    return first + lax.div(lax.div(n, TOGETHER) * span, layout.cdiv(tiles, TOGETHER))


def _kernel(*refs, block_n: int, block_k: int, eps: float | None, plan: Plan | None, interpret: bool):
    """Program (column tile): all rows times one tile of gate's columns and the same tile of up's. With a plan also what
    `lora.run` says.

    refs: x [R, K], with eps squares [B, R], w [K, 2F], with a plan arrivals; out [R, F], with a plan arrivals.
    """
    (x, *squares, w), (out,), adapters = split_refs(refs, 2 if eps is None else 3, 1, plan, interpret)
    rows, width = out.shape
    steps = x.shape[1] // block_k

    def product(n, _) -> None:
        starts = (n * block_n, width + n * block_n)
        inverse = None if eps is None else inverse_of(squares[0], x.shape[1], eps, padded_rows(rows))
        between = None
        if adapters is not None:
            at = _pause(steps, n, width // block_n, adapters.plan.late)
            between = at, functools.partial(lora.expand, starts=starts, refs=adapters)
        gate, up = accumulate(x, w, starts, 0, steps, block_n, block_k, between)
        if inverse is not None:
            gate, up = gate * inverse, up * inverse
        row, column = positions(gate.shape, starts[0])
        plgpu.store(out.at[row, column], silu_mul(gate, up, out.dtype), mask=row < rows)

    if adapters is None:
        return product(pl.program_id(0), 0)
    lora.run(x, adapters, width // block_n, 1, product, None)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(
    x: Normed, w: jax.Array, adapters: Adapters | None, arrivals: Any, *, interpret: bool
) -> tuple[jax.Array, Any]:
    given, eps = operands(x)
    rows, outputs = given[0].shape[0], w.shape[1] // 2
    tiles = swiglu_tiles(rows, w.shape[0], outputs, w.dtype.itemsize)
    call = with_adapters(adapters, arrivals, (*given, w), (outputs // tiles.block_n, 1), 0, tiles.block_n, interpret)
    out, *rest = pl.pallas_call(
        functools.partial(
            _kernel, block_n=tiles.block_n, block_k=tiles.block_k, eps=eps, plan=call.plan, interpret=interpret
        ),
        out_shape=(jax.ShapeDtypeStruct((rows, outputs), w.dtype), *call.results),
        grid=call.grid,
        input_output_aliases=call.aliases(1),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="swiglu",
        interpret=interpret,
    )(*call.given)
    return out, rest[0] if rest else None
