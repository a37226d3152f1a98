"""Inputs of a decode attention, and the answer in float64, one row and head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


def inputs(case: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, kv, block_tables, positions. What lies beyond a row's tokens is NaN: reading it would show."""
    rng = np.random.default_rng(seed)
    pages = case.rows * case.pages + 1
    tables = rng.permutation(np.arange(1, pages)).reshape(case.rows, case.pages).astype(np.int32)
    positions = rng.integers(0, case.pages * case.page_size, case.rows).astype(np.int32)
    positions[0] = case.pages * case.page_size - 1
    q = rng.standard_normal((case.rows, case.heads, case.head_dim), np.float32)
    kv = rng.standard_normal((pages, case.page_size, 2, case.kv_heads, case.head_dim), np.float32)
    kv[0] = np.nan
    for table, position in zip(tables, positions, strict=True):
        flat = [(table[t // case.page_size], t % case.page_size) for t in range(case.pages * case.page_size)]
        for page, offset in flat[position + 1 :]:
            kv[page, offset] = np.nan
        if case.window is not None:
            for page, offset in flat[: max(0, position - case.window + 1)]:
                kv[page, offset] = np.nan
    return q, kv, tables, positions


def attention(q, kv, tables, positions, *, scale: float, window: int | None) -> np.ndarray:
    """[R, H, D] float64."""
    q, kv = q.astype(np.float64), kv.astype(np.float64)
    out = np.zeros_like(q)
    size, group = kv.shape[1], q.shape[1] // kv.shape[3]
    for row, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        t = np.arange(first, position + 1)
        k, v = (kv[tables[row, t // size], t % size, part] for part in (0, 1))
        for head in range(q.shape[1]):
            scores = k[:, head // group] @ q[row, head] * scale
            p = np.exp(scores - scores.max())
            out[row, head] = p / p.sum() @ v[:, head // group]
    return out
