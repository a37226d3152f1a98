"""Ops of a step against float64, for tests of the interpreted, the plain-JAX and, on a GPU, the compiled form.

Each `check_` raises AssertionError that tells what is wrong. `form`: "interpret", "xla" or "triton" (compiled).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.prefill_attention import prefill_attention
from lora_jax.kernels.rope_cache import HeadNorms, rope_to_cache
from lora_jax.kernels.skinny_matmul import skinny_matmul

from . import attention_oracle as oracle

FORMS = ("interpret", "xla")
ATTENTION_BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}  # of a row's norm
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # one unit in the last place, at most
PRODUCT_BOUND = 1e-5  # of the sum of the products' sizes: float32 sums of exact products


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
    out, kv = run(decode_attention, given.qkv, given.rope, given.kv, given.tables, given.positions, **options)
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


def check_matmul(rows: int, inputs: int, outputs: int, dtype: str, form: str) -> int:
    """Returns the number of partial sums. Of many columns some are compared, both ends and every tile among them."""
    x, w = matmul_operands(rows, inputs, outputs, dtype)
    parts = run(skinny_matmul, x, w, **how(form))
    assert parts.dtype == np.float32 and parts.shape[1:] == (rows, outputs)
    columns = np.unique(np.linspace(0, outputs - 1, min(outputs, 1024)).astype(int))
    x, w, parts = x.astype(np.float64), w[:, columns].astype(np.float64), parts[..., columns].astype(np.float64)
    size = np.abs(x) @ np.abs(w)
    error = np.abs(parts.sum(0) - x @ w) / size
    assert error.max() <= PRODUCT_BOUND, error.max()
    return len(parts)


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
