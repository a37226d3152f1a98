"""Ops of a step against float64, for tests of the interpreted, the plain-JAX and, on a GPU, the compiled form.

Each `check_` raises AssertionError that tells what is wrong. `form`: "interpret", "xla" or "triton" (compiled).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.deferred_norm import DeferredNorm, Normed
from lora_jax.kernels.prefill_attention import prefill_attention
from lora_jax.kernels.residual_matmul import residual_matmul
from lora_jax.kernels.rope_cache import HeadNorms, rope_to_cache
from lora_jax.kernels.skinny_matmul import skinny_matmul
from lora_jax.kernels.swiglu import swiglu

from . import attention_oracle as oracle

FORMS = ("interpret", "xla")
ATTENTION_BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}  # of a row's norm
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # one unit in the last place, at most
PRODUCT_BOUND = 1e-5  # of the sum of the products' sizes: float32 sums of exact products
EPS = 1e-2  # of a norm left to a product: it shows in rows of small values


def how(form: str) -> dict[str, Any]:
    return dict(implementation="xla" if form == "xla" else "triton", interpret=form == "interpret")


def run(op: Any, *args: Any, **options: Any) -> Any:
    """op's results as numpy arrays. Nothing is donated."""
    with jax.default_matmul_precision("highest"):
        out = jax.jit(lambda *a: op(*a, **options))(*args)
    return jax.tree.map(np.asarray, out)


def _norms(given: oracle.Given) -> HeadNorms | None:
    norms = given.norms
    return None if norms is None else HeadNorms(jnp.asarray(norms.q), jnp.asarray(norms.k), norms.eps)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def check_rows(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """got, want [N, H, D]; the error of each row against its own size."""
    assert got.shape == want.shape, (got.shape, want.shape)
    norm = lambda x: np.linalg.norm(x.astype(np.float64).reshape(len(x), -1), axis=1)  # noqa: E731
    error = norm(got.astype(np.float64) - want) / norm(want)
    assert (error <= ATTENTION_BOUND[dtype]).all(), f"rows are wrong, relative errors {error}"


def check_cache(got: np.ndarray, want: np.ndarray, given: oracle.Decode | oracle.Prefill) -> None:
    """Values as they came, keys within rounding, each at its token's place; every other bit is what it was."""
    size, dtype = got.shape[1], got.dtype.name
    page, offset = given.index // size, given.index % size
    mine = page > 0  # padding goes to page 0, several rows to one place
    page, offset = page[mine], offset[mine]
    assert same_bits(got[page, offset, 1], want[page, offset, 1]), "values"
    keys, expected = (x[page, offset, 0].astype(np.float64) for x in (got, want))
    assert np.abs(keys - expected).max() <= 4 * ROUNDING[dtype] * np.abs(expected).max(), "keys"
    rest = got.copy()
    rest[page, offset], rest[0] = given.kv[page, offset], given.kv[0]
    assert same_bits(rest, given.kv), "the cache changed where no new token lies"


def scoring(case: Any) -> dict[str, Any]:
    return dict(scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap)


def decode(given: oracle.Decode, case: Any, form: str) -> tuple[np.ndarray, np.ndarray]:
    """(outputs [R, H, D], cache)."""
    options = dict(heads=given.heads, norms=_norms(given), **scoring(case), **how(form))
    arrivals = new_arrivals(case.rows * case.kv_heads + 3)  # more than it needs, as other kernels may need more
    operands = given.qkv, given.rope, given.kv, given.tables, given.positions, arrivals
    out, kv, arrivals = run(decode_attention, *operands, **options)
    assert not arrivals.any(), "what is left for the next kernel"
    return out.reshape(case.rows, case.heads, case.head_dim), kv


def check_decode(case: Any, form: str, **kind: Any) -> None:
    """kind: `parts` and `norms` of decode_inputs."""
    given, options = oracle.decode_inputs(case, **kind), scoring(case)
    want, kv = oracle.decode(given, **options)
    got, got_kv = decode(given, case, form)
    check_rows(got, want, case.dtype)
    check_cache(got_kv, kv, given)
    # the bound tells one token more or fewer
    past = np.maximum(given.positions - 1, 0)
    q, far = oracle.new_heads(given)[0], 1.5 * ATTENTION_BOUND[case.dtype] * np.linalg.norm(want[0])
    one = lambda at, **other: oracle.attention(q[0], kv, given.tables[0], int(at[0]), **{**options, **other})  # noqa: E731
    assert np.linalg.norm(one(past, window=case.window and case.window - 1) - want[0]) > far
    if case.softcap is not None:  # and a cap from none
        assert np.linalg.norm(one(given.positions, softcap=None) - want[0]) > far


def check_neighbours(case: Any, form: str) -> None:
    """The first of three rows, its pages included, has the same bits whatever the others are."""
    given = oracle.decode_inputs(case, parts=2)
    given.positions[:] = 5, 9, 80
    kv = np.nan_to_num(given.kv.astype(np.float32), nan=0.5).astype(given.kv.dtype)
    given = dataclasses.replace(given, kv=kv)
    one, kv_one = decode(given, case, form)
    others = oracle.with_nan(given, [1, 2])
    others.positions[1:] = 140, 0
    other, kv_other = decode(others, case, form)
    own = given.tables[0]
    assert same_bits(one[0], other[0]) and np.isfinite(one[0].astype(np.float64)).all()
    assert same_bits(kv_one[own], kv_other[own])
    assert np.isnan(other[1:].astype(np.float64)).all(), "a NaN must not turn into a number"


def rope(given: oracle.Prefill, form: str) -> tuple[np.ndarray, np.ndarray]:
    options = dict(heads=given.heads, norms=_norms(given), **how(form))
    return run(rope_to_cache, given.qkv, given.rope, given.kv, given.index, **options)


def check_rope(given: oracle.Prefill, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the queries and the cache."""
    q, kv = rope(given, form)
    want, dtype = oracle.new_heads(given)[0], given.kv.dtype.name
    assert np.abs(q.astype(np.float64) - want).max() <= 4 * ROUNDING[dtype] * np.abs(want).max(), "queries"
    check_cache(kv, oracle.written(given), given)
    return q, kv


def prefill(q: np.ndarray, kv: np.ndarray, given: oracle.Prefill, form: str, **scores: Any) -> np.ndarray:
    """[T, H, D]. scores: window, softcap."""
    options = dict(scale=q.shape[2] ** -0.5, **scores, **how(form))
    lists = given.positions, given.sequences, given.page_list, given.blocks
    return run(prefill_attention, q, kv, *lists, **options)


def check_prefill(given: oracle.Prefill, form: str, *, window: int | None, softcap: float | None = None) -> None:
    """Rotation and cache, then attention over what was written."""
    q, kv = check_rope(given, form)
    want, _ = oracle.prefill(given, scale=q.shape[2] ** -0.5, window=window, softcap=softcap)
    got = prefill(q, kv, given, form, window=window, softcap=softcap)
    check_rows(got[: given.tokens], want, q.dtype.name)


@functools.cache
def _weights(inputs: int, outputs: int, dtype: str) -> np.ndarray:
    """A prime number of values, repeated: no two rows or columns are alike."""
    values = np.random.default_rng(0).standard_normal(1_000_003, np.float32)
    return np.resize(values.astype(oracle.numpy_dtype(dtype)), (inputs, outputs))


def matmul_operands(rows: int, inputs: int, outputs: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rows).standard_normal((rows, inputs), np.float32)
    return x.astype(oracle.numpy_dtype(dtype)), _weights(inputs, outputs, dtype)


def deferred(x: np.ndarray, blocks: int, size: float = 1.0) -> DeferredNorm:
    """A norm of rows like x's, scaled by about `size`. Their own sizes differ by up to 8, so that another row's shows, and the
    first is small, so that eps shows."""
    rows, inputs = x.shape
    rng = np.random.default_rng(inputs)
    values = x.astype(np.float64) / 2.0 ** ((3 - np.arange(rows)) % 4)[:, None]
    scaled = (values * size * rng.uniform(0.5, 1.5, inputs)).astype(x.dtype)
    shares = rng.dirichlet(np.ones(blocks), rows).T
    squares = (shares * (values * values).sum(1)).astype(np.float32)
    return DeferredNorm(scaled, squares, EPS)


def exact(x: Any) -> np.ndarray:
    """What an array or a DeferredNorm stands for, in float64."""
    if not isinstance(x, DeferredNorm):
        return np.asarray(x).astype(np.float64)
    mean = np.asarray(x.squares).astype(np.float64).sum(0) / x.scaled.shape[1]
    return np.asarray(x.scaled).astype(np.float64) / np.sqrt(mean + x.eps)[:, None]


def with_wrong_norm(x: DeferredNorm) -> list[DeferredNorm]:
    """Without eps, without half of the blocks and, where there are several rows, with another row's squares."""
    squares = np.asarray(x.squares)
    wrong = [squares[: (len(squares) + 1) // 2]] if len(squares) > 1 else []
    wrong += [np.roll(squares, 1, axis=1)] if squares.shape[1] > 1 else []
    return [dataclasses.replace(x, eps=0.0), *(dataclasses.replace(x, squares=v) for v in wrong)]


def some(columns: int) -> np.ndarray:
    """Of many columns some, both ends and every tile among them."""
    return np.unique(np.linspace(0, columns - 1, min(columns, 1024)).astype(int))


def check_matmul(rows: int, inputs: int, outputs: int, dtype: str, form: str, blocks: int | None = None) -> int:
    """blocks: of the squares of a DeferredNorm, None for an array. Returns the number of partial sums."""
    x, w = matmul_operands(rows, inputs, outputs, dtype)
    given: Normed | np.ndarray = x if blocks is None else deferred(x, blocks)
    parts = run(skinny_matmul, given, w, **how(form))
    assert parts.dtype == np.float32 and parts.shape[1:] == (rows, outputs)
    columns = some(outputs)
    w, got = w[:, columns].astype(np.float64), parts[..., columns].astype(np.float64).sum(0)
    bound = PRODUCT_BOUND * (np.abs(exact(given)) @ np.abs(w))
    error = np.abs(got - exact(given) @ w) / bound
    assert error.max() <= 1, error.max()
    for wrong in with_wrong_norm(given) if isinstance(given, DeferredNorm) else ():
        assert (np.abs(got - exact(wrong) @ w) > bound).mean() > 0.2, "the bound does not tell a wrong norm"
    return len(parts)


def check_swiglu(rows: int, inputs: int, outputs: int, dtype: str, form: str, blocks: int | None = None) -> None:
    """blocks as in `check_matmul`. Results are near 1, where silu is no straight line."""
    x, w = matmul_operands(rows, inputs, 2 * outputs, dtype)
    size = inputs**-0.5
    given = (x * size).astype(x.dtype) if blocks is None else deferred(x, blocks, size)
    got = run(swiglu, given, w, **how(form))
    assert got.dtype == x.dtype and got.shape == (rows, outputs)
    columns = some(outputs)
    halves = tuple(half[:, columns].astype(np.float64) for half in np.split(w, 2, 1))

    def error_of(x: np.ndarray, *halves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        offs = [PRODUCT_BOUND * (abs(x) @ abs(w)) for w in halves]
        return gated_error(got[:, columns], [x @ w for w in halves], offs, dtype)

    error, bound = error_of(exact(given), *halves)
    assert (error <= bound).all(), (error / bound).max()
    swapped, _ = error_of(exact(given), *halves[::-1])
    assert (swapped > bound).mean() > 0.5, "the bound does not tell gate from up"
    for wrong in with_wrong_norm(given) if isinstance(given, DeferredNorm) else ():
        error, _ = error_of(exact(wrong), *halves)
        assert (error > bound).mean() > 0.2, "the bound does not tell a wrong norm"


def gated_error(
    got: np.ndarray, halves: Sequence[np.ndarray], offs: Sequence[np.ndarray], dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Error and bound of silu(gate) * up, halves of a product that may be off by `offs`: of those, and of one rounding each of
    gate, silu(gate), up and the result. silu is nowhere steeper than 1.1."""
    (gate, up), (gate_off, up_off) = halves, offs
    half, smallest = ROUNDING[dtype] / 2, float(ml_dtypes.finfo(oracle.numpy_dtype(dtype)).smallest_subnormal)
    silu = gate / (1 + np.exp(-gate))
    silu_off = 1.1 * (half * abs(gate) + gate_off) + half * abs(silu)
    up_off = half * abs(up) + up_off
    bound = silu_off * abs(up) + abs(silu) * up_off + silu_off * up_off + half * abs(silu * up) + smallest
    return np.abs(got.astype(np.float64) - silu * up), (1 + 4 * half) * bound  # roundings of what is off already


@functools.cache
def _grid_weights(inputs: int, outputs: int, dtype: str) -> np.ndarray:
    return grid(_weights(inputs, outputs, "float32")).astype(oracle.numpy_dtype(dtype))


def grid(x: np.ndarray) -> np.ndarray:
    """Multiples of 1/8 of at most 2: a product's float32 sums are exact in any order."""
    return np.round(np.clip(x * 0.5, -2, 2) * 8) / 8


def residual_operands(rows: int, inputs: int, outputs: int, dtype: str) -> tuple[np.ndarray, ...]:
    """y, w, x and scale. x + y @ w is exact before it is rounded."""
    rng, kind = np.random.default_rng(rows + inputs), oracle.numpy_dtype(dtype)
    y, x = (grid(rng.standard_normal((rows, n))).astype(kind) for n in (inputs, outputs))
    return y, _grid_weights(inputs, outputs, dtype), x, rng.uniform(0.5, 1.5, outputs).astype(kind)


def check_residual(
    rows: int, inputs: int, outputs: int, dtype: str, form: str, arrivals: np.ndarray | None = None
) -> np.ndarray:
    """arrivals: of the call before. Returns those for the next."""
    y, w, x, scale = residual_operands(rows, inputs, outputs, dtype)
    before = new_arrivals(outputs // 64) if arrivals is None else arrivals
    total, norm, after = run(residual_matmul, y, w, x, scale, before, eps=EPS, **how(form))
    assert same_bits(total, added(x, y.astype(np.float64) @ w.astype(np.float64))), "the sum"
    check_next_norm(total, norm, scale, dtype, form)
    assert same_bits(after, np.zeros(outputs // 64, np.int32)), "arrivals"
    return after


def added(x: np.ndarray, product: np.ndarray) -> np.ndarray:
    """x + product, float64 and exact, rounded before and after it is added."""
    return (x.astype(np.float64) + product.astype(x.dtype).astype(np.float64)).astype(x.dtype)


def check_next_norm(total: np.ndarray, norm: DeferredNorm, scale: np.ndarray, dtype: str, form: str) -> None:
    """norm: what `residual_matmul` makes of its total."""
    half = ROUNDING[dtype] / 2
    early = half if form == "xla" else 0.0  # XLA may go on with what is not rounded yet
    assert norm.scaled.dtype == total.dtype and norm.squares.dtype == np.float32 and norm.eps == EPS
    want = total.astype(np.float64)
    scaled, squares = want * scale.astype(np.float64), (want * want).sum(1)
    off = np.abs(norm.scaled.astype(np.float64) - scaled)
    assert (off <= (half + early) * np.abs(scaled)).all(), "what is scaled"
    off = np.abs(norm.squares.astype(np.float64).sum(0) - squares)
    assert norm.squares.shape[1:] == total.shape[:1] and (off <= (2 * early + PRODUCT_BOUND) * squares).all(), "squares"
    check_normed(norm, want, scale, dtype)


def check_normed(norm: DeferredNorm, x: np.ndarray, scale: np.ndarray, dtype: str) -> None:
    """norm: of x float64 [R, D], scaled by scale [D]."""
    want = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * scale.astype(np.float64)
    got = np.asarray(norm.normed())
    error = np.abs(got.astype(np.float64) - want) / np.abs(want).clip(1e-6)
    assert got.dtype == oracle.numpy_dtype(dtype)
    assert error.max() <= (2 if dtype != "float32" else 8) * ROUNDING[dtype], ("normed", error.max())


def check_repeated(rows: int, sizes: tuple[int, ...], outputs: int, dtype: str, form: str, calls: int) -> None:
    """A chain of residual_matmul, of these numbers of inputs by turns, run `calls` times: the same bits every time.

    The order of the parts shows in the sums, and no two neighbours in the chain have the same, so that a part left by the call
    before would show too.
    """
    links = []
    for i, inputs in enumerate(sizes * 2):
        y, w = matmul_operands(rows, inputs, outputs, dtype)
        links.append((np.roll(y, i, axis=1), w))
    x, scale = (np.resize(links[0][1], (rows, outputs)), np.ones(outputs, links[0][1].dtype))

    def chain(links, x, scale, arrivals):
        out = []
        for y, w in links:
            total, norm, arrivals = residual_matmul(y, w, x, scale, arrivals, eps=EPS, **how(form))
            out.append((total, norm))
        return out, arrivals

    jitted = jax.jit(chain, donate_argnums=3)
    links, x, scale = jax.device_put((links, x, scale))
    arrivals, results = new_arrivals(outputs // 64), []
    for _ in range(calls):
        out, arrivals = jitted(links, x, scale, arrivals)
        results.append(out)
    first, *others = ([np.asarray(v) for v in jax.tree.leaves(out)] for out in results)
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True)), "the bits depend on who was last"


def norm_operands(
    rows: int, size: int, dtype: str, parts: int | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """x, y (parts None: none, 0: [R, D], else [S, R, D]) and scale. Sums of x and y are exact before they are rounded."""
    rng, kind = np.random.default_rng(size), oracle.numpy_dtype(dtype)
    grid = lambda *shape: np.round(rng.standard_normal(shape) * 64) / 64  # noqa: E731
    y = None if parts is None else grid(rows, size).astype(kind) if parts == 0 else grid(parts, rows, size).astype("f4")
    return grid(rows, size).astype(kind), y, rng.uniform(0.5, 1.5, size).astype(kind)


def check_norm(rows: int, size: int, dtype: str, parts: int | None, form: str) -> None:
    x, y, scale = norm_operands(rows, size, dtype, parts)
    total, normed = run(lambda x, scale, **o: add_rms_norm(x, y, scale, eps=1e-5, **o), x, scale, **how(form))
    want = x.astype(np.float64)
    if y is not None:
        added = y.astype(np.float64).sum(0) if parts else y.astype(np.float64)
        want = want + added.astype(x.dtype).astype(np.float64)
    assert same_bits(total, want.astype(x.dtype)), "the sum"
    exact = total.astype(np.float64)
    exact = exact / np.sqrt((exact * exact).mean(1, keepdims=True) + 1e-5) * scale.astype(np.float64)
    error = np.abs(normed.astype(np.float64) - exact) / np.abs(exact).clip(1e-6)
    assert normed.dtype == x.dtype and error.max() <= (2 if dtype != "float32" else 8) * ROUNDING[dtype], error.max()


def smaller(case: Any) -> Any:
    """Few rows and KV heads, for the interpreter."""
    kv_heads = min(2, case.kv_heads)
    return dataclasses.replace(
        case, rows=min(case.rows, 3), heads=case.heads // case.kv_heads * kv_heads, kv_heads=kv_heads
    )
