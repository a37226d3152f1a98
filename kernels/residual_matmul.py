"""x + y @ w of few rows and all of the RMSNorm after it but the division, as one kernel: no kernel of its own for the norm.

K is split over programs, as in `skinny_matmul`. The last one of a tile of columns to finish adds the parts up, in their order
and not in that in which they came, so that the result does not depend on who was last; nobody waits for anybody.
Letters: R rows, K inputs, N outputs, S parts of K, B blocks of columns.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import fused_lora as lora
from . import lora_layout as layout
from .adapters import Adapters, adapter_counters, check_adapters
from .arrivals import check_arrivals, when_last
from .deferred_norm import DeferredNorm
from .fused_plan import Plan, split_refs, with_adapters
from .in_kernel import padded_rows, positions
from .skinny_matmul import accumulate, check_product, fits, plain_product
from .tuning import matmul_tiles

MAX_ROWS = 16  # with more, what the last program of a tile has to read costs more than a norm of its own


# ---- 1. the public op ------------------------------------------------------------------------------------------------
def fits_residual(rows: int, inputs: int, outputs: int, dtype: jnp.dtype) -> bool:
    """Whether `residual_matmul` takes a product of these sizes. Not in float16: what is not divided yet could overflow."""
    return rows <= MAX_ROWS and fits(rows, inputs, outputs) and dtype != jnp.float16


@functools.partial(jax.jit, static_argnames=("eps", "implementation", "interpret"))
def residual_matmul(
    y: jax.Array,
    w: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    arrivals: jax.Array,
    *,
    eps: float,
    adapters: Adapters | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, DeferredNorm, jax.Array]:
    """(x + y @ w [R, N], its RMSNorm with that scale, arrivals for the next call).

    y [R, K], w [K, N], x [R, N] and scale [N] of one dtype, to which y @ w is rounded before it is added; R, K, N and the
    dtype as `fits_residual` says. arrivals: of `new_arrivals`, N / 64 at least and with adapters `adapter_counters` more and
    new in every step, donated by the caller or copied. adapters: each row's own, of y @ w.
    A row's bits do not depend on the other rows, nor on which slots are in use. Raises: ValueError naming the operand.
    """
    layout.check_implementation("residual_matmul", implementation)
    check_product("residual_matmul", y, w, w.shape[-1], "y")
    rows, outputs = y.shape[0], w.shape[1]
    if not fits_residual(rows, w.shape[0], outputs, w.dtype):
        raise ValueError(f"residual_matmul: at most {MAX_ROWS} rows of bfloat16 or float32, got y {y.dtype} {y.shape}")
    for name, given, shape in (("x", x, (rows, outputs)), ("scale", scale, (outputs,))):
        if given.shape != shape or given.dtype != y.dtype:
            raise ValueError(f"residual_matmul: {name} must be {y.dtype} {shape}, got {given.dtype} {given.shape}")
    more = 0
    if adapters is not None:
        check_adapters("residual_matmul", adapters, arrivals, rows, w.shape[0], outputs, w.dtype)
        more = adapter_counters(adapters.items, adapters.a.shape[0])
    check_arrivals("residual_matmul", arrivals, outputs // 64 + more)
    if implementation == "xla":
        x = x + plain_product(y, w, adapters).astype(x.dtype)
        squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1)[None]
        return x, DeferredNorm(x * scale, squares, eps), arrivals
    return _triton(y, w, x, scale, arrivals, eps, adapters, interpret=interpret)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(*refs, block_n: int, block_k: int, parts: int, plan: Plan | None, interpret: bool):
    """Program (column tile, part): the part's sums; the last one of the tile also everything else. With a plan also what
    `lora.run` says, and the adapters' sums as one part more.

    refs: y [R, K], w [K, N], x [R, N], scale [N], arrivals; total and scaled [R, N], squares [B, R] float32, sums [S, R, N]
    float32, arrivals again.
    """
    (y, w, x, scale), results, adapters = split_refs(refs, 4, 4, plan, interpret)
    if adapters is None:
        results, arrivals = results[1:5], results[5]  # beside arrivals as they were
    else:
        arrivals = adapters.counters
    steps = y.shape[1] // parts // block_k
    arrive = functools.partial(_arrive, x, scale, *results, arrivals, interpret=interpret)

    def product(n, s) -> None:
        (acc,) = accumulate(y, w, (n * block_n,), s * steps, steps, block_n, block_k)
        arrive(acc, n, s)

    if adapters is None:
        return product(pl.program_id(0), pl.program_id(1))

    def expand(n) -> None:
        arrive(lora.expand_alone(n * block_n, block_n, adapters), n, parts)

    lora.run(y, adapters, results[0].shape[1] // block_n, parts, product, expand)


def _arrive(x, scale, total, scaled, squares, parts, arrivals, acc, n, s, *, interpret: bool) -> None:
    """Part s of column tile n is acc, float32 [padded R, columns]."""
    (rows, block_n), count, dtype = (x.shape[0], acc.shape[1]), parts.shape[0], total.dtype
    row, column = positions(acc.shape, n * block_n)
    inside = row < rows

    def finish(product) -> None:
        before = plgpu.load(x.at[row, column], mask=inside, other=0).astype(jnp.float32)
        v = (before + product.astype(dtype).astype(jnp.float32)).astype(dtype)
        plgpu.store(total.at[row, column], v, mask=inside)
        plgpu.store(scaled.at[row, column], v * scale[pl.ds(n * block_n, block_n)][None], mask=inside)
        v = v.astype(jnp.float32)
        at = lax.iota(jnp.int32, padded_rows(rows))
        plgpu.store(squares.at[jnp.full(at.shape, n), at], jnp.sum(v * v, axis=1), mask=at < rows)

    if count == 1:
        finish(acc)
        return
    at_part = lambda i: parts.at[jnp.full(acc.shape, i), row, column]  # noqa: E731
    plgpu.store(at_part(s), acc, mask=inside)

    def join() -> None:
        finish(functools.reduce(jnp.add, [plgpu.load(at_part(i), mask=inside, other=0) for i in range(count)]))

    when_last(arrivals, n, count, join, interpret=interpret)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(
    y, w, x, scale, arrivals, eps: float, adapters: Adapters | None, *, interpret: bool
) -> tuple[jax.Array, DeferredNorm, jax.Array]:
    (rows, inputs), outputs = y.shape, w.shape[1]
    tiles = matmul_tiles(rows, inputs, outputs, w.dtype.itemsize)
    like = jax.ShapeDtypeStruct
    out, blocks = like(x.shape, x.dtype), outputs // tiles.block_n
    call = with_adapters(adapters, arrivals, (y, w, x, scale), (blocks, tiles.parts), blocks, tiles.block_n, interpret)
    if adapters is None:  # the counters are the product's own
        call = call._replace(given=(*call.given, arrivals), results=(like(arrivals.shape, arrivals.dtype),))
    parts = tiles.parts + (adapters is not None)
    total, scaled, squares, _, arrivals, *_ = pl.pallas_call(
        functools.partial(
            _kernel,
            block_n=tiles.block_n,
            block_k=tiles.block_k,
            parts=tiles.parts,
            plan=call.plan,
            interpret=interpret,
        ),
        out_shape=(
            out,
            out,
            like((blocks, rows), jnp.float32),
            like((parts, rows, outputs), jnp.float32),
            *call.results,
        ),
        grid=call.grid,
        input_output_aliases=call.aliases(4),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="residual_matmul",
        interpret=interpret,
    )(*call.given)
    return total, DeferredNorm(scaled, squares, eps), arrivals
