"""Attention over pages against float64: the Triton kernel interpreted, the plain-JAX form, and prefill."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lora_jax.kernels.cases import ATTENTION_CASES, AttentionCase
from lora_jax.kernels.paged_attention import paged_decode_attention
from lora_jax.kernels.paged_prefill import paged_prefill_attention

from tests.support import attention_oracle as oracle
from tests.support.gpu_program import CARDS, run_compiler

BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
SMALL = [
    dataclasses.replace(
        c, rows=min(c.rows, 3), heads=c.heads // c.kv_heads * min(2, c.kv_heads), kv_heads=min(2, c.kv_heads)
    )
    for c in ATTENTION_CASES
]


def decode(case: AttentionCase, given, implementation: str) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    q, kv, tables, positions = given
    with jax.default_matmul_precision("highest"):
        out = jax.jit(
            lambda *args: paged_decode_attention(
                *args, scale=case.head_dim**-0.5, window=case.window, implementation=implementation, interpret=True
            )
        )(q.astype(dtype), kv.astype(dtype), tables, positions)
    return np.asarray(out, np.float64)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_decode_equals_float64(case, implementation):
    given = oracle.inputs(case)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    rounded = (given[0].astype(dtype), given[1].astype(dtype), *given[2:])
    want = oracle.attention(*rounded, scale=case.head_dim**-0.5, window=case.window)
    got = decode(case, given, implementation)
    assert np.linalg.norm(got - want) <= BOUND[case.dtype] * np.linalg.norm(want)
    # the bound tells a page too many from none
    fewer = None if case.window is None else case.window - 1
    shorter = oracle.attention(*rounded[:3], np.maximum(rounded[3] - 1, 0), scale=case.head_dim**-0.5, window=fewer)
    assert np.linalg.norm(shorter - want) > 2 * BOUND[case.dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_a_row_does_not_depend_on_its_neighbours(implementation):
    case = AttentionCase("three", 3, 4, 2, 16, 4, 40, dtype="float32")
    q, kv, tables, positions = oracle.inputs(case)
    positions = np.array([5, 9, 80], np.int32)
    kv = np.nan_to_num(kv, nan=0.5)
    one = decode(case, (q, kv, tables, positions), implementation)[0]
    kv[tables[1:].ravel()] = np.nan
    q[1:] = 7
    other = decode(case, (q, kv, tables, np.array([5, 150, 2], np.int32)), implementation)[0]
    assert one.tobytes() == other.tobytes() and np.isfinite(one).all()


@pytest.mark.parametrize("window", [None, 6])
def test_prefill_equals_float64(window):
    """Three sequences in one flat batch; the first goes on where an earlier chunk ended. One of them holds a NaN."""
    rng = np.random.default_rng(0)
    size, heads, kv_heads, d, lengths, starts = 4, 4, 2, 16, (9, 1, 14), (10, 0, 0)
    q, kv = rng.standard_normal((32, heads, d), np.float32), np.full((30, size, 2, kv_heads, d), np.nan, np.float32)
    positions, sequences = np.zeros(32, np.int32), np.full(32, -1, np.int32)
    page_list = np.zeros((3, 40), np.int32)
    page_list[1] = -1
    at = used = 0
    free = rng.permutation(np.arange(1, 30)).tolist()
    tables = np.zeros((3, 10), np.int32)
    for s, (n, start) in enumerate(zip(lengths, starts, strict=True)):
        positions[at : at + n], sequences[at : at + n] = np.arange(start, start + n), s
        for page in range(-(-(start + n) // size)):
            tables[s, page] = free.pop()
            page_list[:, used] = tables[s, page], s, page * size
            used += 1
        for t in range(start + n):
            kv[tables[s, t // size], t % size] = rng.standard_normal((2, kv_heads, d))
        at += n
    kv[tables[1, 0], 0, 1] = np.nan  # the value of sequence 1's only token
    run = jax.jit(lambda *args: paged_prefill_attention(*args, scale=0.25, window=window))
    with jax.default_matmul_precision("highest"):
        got = np.asarray(run(q, kv, positions, sequences, page_list), np.float64)
    for row in range(at):
        s = sequences[row]
        if s == 1:
            assert np.isnan(got[row]).all(), "a NaN must not turn into a number"
            continue
        want = oracle.attention(
            q[row : row + 1], kv, tables[s : s + 1], positions[row : row + 1], scale=0.25, window=window
        )
        np.testing.assert_allclose(got[row], want[0], atol=1e-5)
    assert np.isfinite(got[at:]).all()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("card", CARDS)
def test_the_kernel_compiles_for_every_card(card):
    found = run_compiler("tests.kernels.compile_attention", card)
    assert set(found) == {case.name for case in ATTENTION_CASES}
    for name, summary in found.items():
        assert isinstance(summary, dict), f"{name}: {summary}"
        # one kernel, and where a row's context is split three small ones that put the parts together
        assert summary["shared_bytes"] <= 101_376 and summary["kernels"] <= 4, (name, summary)


def test_wrong_operands_are_named():
    q, kv = jnp.zeros((2, 4, 16)), jnp.zeros((3, 4, 2, 2, 16))
    tables, positions = jnp.zeros((2, 2), jnp.int32), jnp.zeros((2,), jnp.int32)
    call = lambda *args: paged_decode_attention(*args, scale=1.0, implementation="xla")  # noqa: E731
    with pytest.raises(ValueError, match="q \\[R, H, D\\]"):
        call(q[:, :3], kv, tables, positions)
    with pytest.raises(ValueError, match="kv must have the dtype"):
        call(q, kv.astype(jnp.bfloat16), tables, positions)
    with pytest.raises(ValueError, match="positions"):
        call(q, kv, tables, positions[:1])
    with pytest.raises(ValueError, match="block_tables"):
        call(q, kv, tables.astype(jnp.float32), positions)
