"""Attention that begins the adapters of the linear after it, and that linear, against float64; for tests of the interpreted form
and, on a GPU, of the compiled one. Each `check` raises AssertionError."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from lora_jax.kernels.adapters import Adapters, adapter_counters
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.decode_attention import decode_attention, lora_decode_attention
from lora_jax.kernels.lora_items import most_items, work_items
from lora_jax.kernels.residual_matmul import residual_matmul

from . import kernel_checks as checks

PAGE, LAYERS, LINEAR, OUTPUTS = 16, 2, 1, 256


@dataclass(frozen=True)
class Case:
    """slots: of the rows, -1: none. ranks: of the slots. context: tokens that a row may have."""

    heads: int
    kv_heads: int
    size: int
    context: int
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    padded_rank: int
    dtype: str = "bfloat16"
    window: int | None = None

    @property
    def id(self) -> str:
        return f"{len(self.slots)}x{self.heads}.{self.kv_heads}x{self.size}-c{self.context}-r{self.padded_rank}-{self.dtype}"


CASES = (
    Case(8, 8, 64, 60, (0, 1, -1, 2, 1), (16, 3, 8), 16),
    Case(8, 2, 64, 60, (0, 1, -1, 2), (8, 5, 0), 8),
    Case(8, 2, 32, 1000, (0, 1, -1, 2), (16, 0, 4), 16, window=40),
    Case(4, 4, 64, 400, (2, -1, 0), (16, 8, 4), 16),
    Case(4, 4, 96, 60, (0, 1, -1, 2), (16, 8, 4), 16, "float32"),
    Case(4, 4, 64, 60, (0, 1, 3, 2, -1, 1), (64, 33, 5, 16), 64),
    Case(4, 1, 32, 60, (3, 1, 0), (1, 17, 32, 20), 32, "float32"),
)


@dataclass(frozen=True)
class Given:
    case: Case
    attention: tuple
    adapters: Adapters
    w: Any
    residual: Any


def make(case: Case, seed: int = 0) -> Given:
    """seed: of the adapters and of the rows' order of work alone."""
    kind = checks.oracle.numpy_dtype(case.dtype)
    rng, rows, size = np.random.default_rng(1), len(case.slots), case.heads * case.size
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    pages = -(-case.context // PAGE)
    kv = draw(1 + rows * pages, PAGE, 2, case.kv_heads, case.size).astype(kind)
    tables = 1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    positions = rng.integers(0, case.context, rows).astype(np.int32)
    qkv, angle = draw(2, rows, (case.heads + 2 * case.kv_heads) * case.size), draw(rows, case.size // 2)
    w, residual = (draw(size, OUTPUTS) * size**-0.5).astype(kind), draw(rows, OUTPUTS).astype(kind)
    rng = np.random.default_rng(100 + seed)
    own = np.arange(case.padded_rank) < np.array(case.ranks)[:, None]
    a = draw(LAYERS, len(case.ranks), case.padded_rank, size) * own[..., None] * size**-0.5
    b = draw(LAYERS, len(case.ranks), case.padded_rank, OUTPUTS) * own[..., None]
    used = sorted({s for s in case.slots if s >= 0}, reverse=bool(seed % 2))
    ranks = np.array([case.ranks] * (LINEAR + 1), np.int32)
    items = work_items(used, ranks, case.padded_rank, most_items(len(case.ranks), case.padded_rank))
    at = np.array(case.slots, np.int32), items, np.int32(1)
    adapters = Adapters(a.astype(kind), b.astype(kind), *at, (OUTPUTS,), LINEAR)
    return Given(case, (qkv, (np.cos(angle), np.sin(angle)), kv, tables, positions), adapters, w, residual)


def counters(given: Given) -> Any:
    rows = len(given.case.slots) * given.case.kv_heads
    return new_arrivals(max(rows, OUTPUTS // 64) + adapter_counters(given.adapters.items, LAYERS))


def attend(given: Given, form: str, adapters: Adapters | None) -> tuple:
    case = given.case
    how = dict(heads=case.heads, scale=case.size**-0.5, window=case.window, **checks.how(form))
    if adapters is None:
        return decode_attention(*given.attention, counters(given), **how)
    return lora_decode_attention(*given.attention, counters(given), adapters, **how)


def product(given: Given, x: Any, form: str, adapters: Adapters) -> np.ndarray:
    """Totals of the residual product [R, OUTPUTS]."""
    scale = jnp.ones((OUTPUTS,), given.w.dtype)
    operands = x, given.w, given.residual, scale, counters(given)
    total, _, arrivals = residual_matmul(*operands, eps=1e-5, adapters=adapters, **checks.how(form))
    assert not np.asarray(arrivals).any(), "counters are as they were: nobody had to wait"
    return np.asarray(total)


def check(given: Given, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns: (parts of h, totals)."""
    case, slots = given.case, np.array(given.case.slots)
    out, kv, _ = attend(given, form, None)
    begun_out, begun_kv, arrivals, adapters = attend(given, form, given.adapters)
    assert (np.asarray(out) == np.asarray(begun_out)).all() and (np.asarray(kv) == np.asarray(begun_kv)).all()
    assert not np.asarray(arrivals).any()
    x, a, b = (np.asarray(v).astype(np.float64) for v in (out, given.adapters.a[1], given.adapters.b[1]))
    own = np.array([s >= 0 and case.ranks[s] > 0 for s in slots])
    parts = np.array(adapters.begun)
    h = np.where(own[:, None], np.einsum("tk,trk->tr", x, a[slots]), 0.0)
    off = np.einsum("tk,trk->tr", np.abs(x), np.abs(a[slots])) * 2.0**-20
    error = np.abs(parts.astype(np.float64).sum(0)[:, : case.padded_rank] - h)[own]
    assert (error <= off[own]).all(), f"h is off by {error.max()}"
    if form == "interpret":  # what nobody wrote reaches nobody
        parts[:, ~own] = np.nan
    got = product(given, out, form, dataclasses.replace(adapters, begun=jnp.asarray(parts)))
    want = x @ np.asarray(given.w).astype(np.float64) + np.einsum("tr,trn->tn", h, b[slots])
    want = want + np.asarray(given.residual).astype(np.float64)
    unit = 2.0**-7 if case.dtype == "bfloat16" else 2.0**-18
    error = np.abs(got.astype(np.float64) - want)
    assert (error <= unit * (1 + np.abs(want))).all(), f"the product is off by {error.max()}"
    told = np.abs(np.einsum("tr,trn->tn", h, b[slots])) > 8 * unit * (1 + np.abs(want))
    assert told[own].mean() > 0.3, "the bound does not tell a lost adapter"
    return parts, got
