"""A product of few rows with a large matrix, split along K, that leaves its partial sums to the kernel that follows.

Decode products are bound by reading the matrix. Splitting K keeps every multiprocessor reading; summing the parts in the next
kernel, which reads the result anyway, saves a launch. Letters: R rows, K inputs, N outputs, S parts of K.
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
from .adapters import Adapters, check_adapters, plain_delta
from .deferred_norm import DeferredNorm, Normed, inverse_of
from .fused_plan import Plan, split_refs, with_adapters
from .in_kernel import dot, padded_rows, positions
from .tuning import MAX_ROWS, matmul_tiles


# ---- 1. the public op ------------------------------------------------------------------------------------------------
def fits(rows: int, inputs: int, outputs: int) -> bool:
    """Whether `skinny_matmul` takes a product of these sizes."""
    return rows <= MAX_ROWS and inputs % 64 == 0 and outputs % 64 == 0


@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def skinny_matmul(x: Normed, w: jax.Array, *, implementation: str = "triton", interpret: bool = False) -> jax.Array:
    """x [R, K] @ w [K, N] as partial sums, float32 [S, R, N]: the product is their sum over S.

    x, an array or a `DeferredNorm`, and w of one dtype; R, K, N as `fits` says; S follows from the shapes.
    A row's bits do not depend on the other rows. Raises: ValueError naming the operand.
    """
    layout.check_implementation("skinny_matmul", implementation)
    check_product("skinny_matmul", x, w, w.shape[-1])
    if implementation == "xla":
        return plain_product(x, w)[None]
    return _triton(x, w, None, None, interpret=interpret)[0]


@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def skinny_lora_matmul(
    x: Normed,
    w: jax.Array,
    adapters: Adapters,
    arrivals: jax.Array,
    *,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(`skinny_matmul` with each row's own adapter: one partial sum more, arrivals for the step's next call).

    adapters: of x @ w, R rows; arrivals: of `new_arrivals`, `adapter_counters` at least and new in every step, donated by the
    caller or copied.
    A row's bits do not depend on the other rows, nor on which slots are in use. Raises: ValueError naming the operand.
    """
    layout.check_implementation("skinny_lora_matmul", implementation)
    check_product("skinny_lora_matmul", x, w, w.shape[-1])
    (inputs, outputs), rows = w.shape, x.shape[0]
    check_adapters("skinny_lora_matmul", adapters, arrivals, rows, inputs, outputs, w.dtype)
    if implementation == "xla":
        return plain_product(x, w, adapters)[None], arrivals
    return _triton(x, w, adapters, arrivals, interpret=interpret)


def plain_product(x: Normed, w: jax.Array, adapters: Adapters | None = None) -> jax.Array:
    """x @ w, and what adapters add, in plain JAX, float32 [R, N]."""
    if isinstance(x, DeferredNorm):
        return plain_product(x.scaled, w, adapters) * x.inverse()
    y = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return y if adapters is None else y + plain_delta(x, adapters)


def check_product(op: str, x: Normed, w: jax.Array, outputs: int, name: str = "x") -> None:
    """Raises: ValueError naming the operand unless x and w can be multiplied and `fits` takes them; x is called `name`."""
    values = x.scaled if isinstance(x, DeferredNorm) else x
    if values.ndim != 2 or w.ndim != 2 or values.shape[1] != w.shape[0]:
        raise ValueError(f"{op}: needs {name} [R, K] and w [K, N], got {values.shape} and {w.shape}")
    layout.check_dtype(op, name, values.dtype)
    if values.dtype != w.dtype:
        raise ValueError(f"{op}: w must have the dtype of {name} ({values.dtype}), got {w.dtype}")
    if not fits(values.shape[0], w.shape[0], outputs):
        raise ValueError(
            f"{op}: at most {MAX_ROWS} rows, K and N multiples of 64, got {name} {values.shape} and w {w.shape}"
        )
    if isinstance(x, DeferredNorm) and (x.squares.dtype != jnp.float32 or x.squares.shape[1:] != values.shape[:1]):
        squares = f"{x.squares.dtype} {x.squares.shape}"
        raise ValueError(f"{op}: {name}.squares must be float32 [B, {values.shape[0]}], got {squares}")


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def accumulate(
    x, w, starts: tuple, first, steps: int, block_n: int, block_k: int, between: tuple | None = None
) -> tuple[jax.Array, ...]:
    """In a kernel: for each column of `starts`, all rows of x times block_n columns of w from there on, over `steps` steps of
    block_k inputs from the step `first` on. float32 [padded R, block_n] each, zeros below the last row.
    between: (steps, what is done with the sums after so many)."""
    rows = x.shape[0]
    padded = padded_rows(rows)
    row_mk = lax.broadcasted_iota(jnp.int32, (padded, block_k), 0)
    col_mk = lax.broadcasted_iota(jnp.int32, (padded, block_k), 1)

    def body(i, sums):
        k0 = (first + i) * block_k
        x_mk = plgpu.load(x.at[row_mk, k0 + col_mk], mask=row_mk < rows, other=0)
        tiles = (w[pl.ds(k0, block_k), pl.ds(start, block_n)] for start in starts)
        return tuple(acc + dot(x_mk, w_kn) for acc, w_kn in zip(sums, tiles, strict=True))

    sums = tuple(jnp.zeros((padded, block_n), jnp.float32) for _ in starts)
    if between is None:
        return lax.fori_loop(0, steps, body, sums)
    at, then = between
    return lax.fori_loop(at, steps, body, then(lax.fori_loop(0, at, body, sums)))


def _kernel(*refs, block_n: int, block_k: int, parts: int, eps: float | None, plan: Plan | None, interpret: bool):
    """Program (column tile, part): all rows times one tile of columns, over one part of K. With a plan also what `lora.run`
    says; the adapters' part is the last of S.

    refs: x [R, K], with eps squares [B, R], w [K, N], with a plan arrivals; out [S, R, N] float32, with a plan arrivals.
    """
    (x, *squares, w), (out,), adapters = split_refs(refs, 2 if eps is None else 3, 1, plan, interpret)
    steps = x.shape[1] // parts // block_k

    def store(sums, part, start, inverse) -> None:
        row, column = positions(sums.shape, start)
        sums = sums if inverse is None else sums * inverse
        plgpu.store(out.at[jnp.full(sums.shape, part), row, column], sums, mask=row < x.shape[0])

    def inverse():
        return None if eps is None else inverse_of(squares[0], x.shape[1], eps, padded_rows(x.shape[0]))

    def product(n, s) -> None:
        before = inverse()
        (acc,) = accumulate(x, w, (n * block_n,), s * steps, steps, block_n, block_k)
        store(acc, s, n * block_n, before)

    if adapters is None:
        return product(pl.program_id(0), pl.program_id(1))

    def expand(n) -> None:
        before = inverse()
        store(lora.expand_alone(n * block_n, block_n, adapters), parts, n * block_n, before)

    lora.run(x, adapters, out.shape[2] // block_n, parts, product, expand)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def operands(x: Normed) -> tuple[tuple[jax.Array, ...], float | None]:
    """What a kernel reads of x, and eps if it has to divide."""
    return ((x.scaled, x.squares), x.eps) if isinstance(x, DeferredNorm) else ((x,), None)


def _triton(
    x: Normed, w: jax.Array, adapters: Adapters | None, arrivals: jax.Array | None, *, interpret: bool
) -> tuple[jax.Array, Any]:
    """(sums, arrivals)."""
    given, eps = operands(x)
    (rows, inputs), outputs = given[0].shape, w.shape[1]
    tiles = matmul_tiles(rows, inputs, outputs, w.dtype.itemsize, adapters is not None)
    columns = outputs // tiles.block_n
    call = with_adapters(adapters, arrivals, (*given, w), (columns, tiles.parts), columns, tiles.block_n, interpret)
    out, *rest = pl.pallas_call(
        functools.partial(
            _kernel,
            block_n=tiles.block_n,
            block_k=tiles.block_k,
            parts=tiles.parts,
            eps=eps,
            plan=call.plan,
            interpret=interpret,
        ),
        out_shape=(
            jax.ShapeDtypeStruct((tiles.parts + (adapters is not None), rows, outputs), jnp.float32),
            *call.results,
        ),
        grid=call.grid,
        input_output_aliases=call.aliases(1),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="skinny_matmul",
        interpret=interpret,
    )(*call.given)
    return out, rest[0] if rest else None
