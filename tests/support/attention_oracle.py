"""Inputs of decode and prefill attention, and their answers in float64: rotation as complex numbers, one head at a time.

What must not be read is NaN, so that reading it shows. Intermediate results are rounded to the model's dtype where the ops say
that they round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

GRID = 64  # partial sums are multiples of 1/64 and small: their float32 sum is exact in any order


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True)
class Norms:
    """Scales [D] of the norms of query and key heads."""

    q: np.ndarray
    k: np.ndarray
    eps: float


@dataclass(frozen=True)
class Given:
    """qkv [N, C] or float32 [S, N, C]; rope: cos, sin float32 [N, D/2]; kv [pages, page_size, 2, K, D]; positions int32 [N]."""

    qkv: np.ndarray
    rope: tuple[np.ndarray, np.ndarray]
    kv: np.ndarray
    positions: np.ndarray
    heads: int
    norms: Norms | None


@dataclass(frozen=True)
class Decode(Given):
    """tables int32 [R, P]."""

    tables: np.ndarray

    @property
    def index(self) -> np.ndarray:
        """Where each row's token belongs: page * page_size + offset."""
        size = self.kv.shape[1]
        return self.tables[np.arange(len(self.tables)), self.positions // size] * size + self.positions % size


@dataclass(frozen=True)
class Prefill(Given):
    """Flat tokens; sequences, index int32 [T]; page_list int32 [3, N], blocks int32 [4, B]; tokens: those that are no padding."""

    sequences: np.ndarray
    index: np.ndarray
    page_list: np.ndarray
    blocks: np.ndarray
    tokens: int


def _projection(rng, tokens: int, case: Any, parts: int) -> dict[str, Any]:
    """qkv (parts 0: of the case's dtype) and cos and sin."""
    shape = (max(parts, 1), tokens, (case.heads + 2 * case.kv_heads) * case.head_dim)
    values = np.round(rng.standard_normal(shape) * GRID / np.sqrt(shape[0])) / GRID
    angles = rng.uniform(-np.pi, np.pi, (tokens, case.head_dim // 2)).astype(np.float32)
    qkv = values.astype(np.float32) if parts else values[0].astype(numpy_dtype(case.dtype))
    return dict(qkv=qkv, rope=(np.cos(angles), np.sin(angles)), heads=case.heads)


def _norms(rng, case: Any, wanted: bool) -> Norms | None:
    scale = lambda: rng.uniform(0.5, 1.5, case.head_dim).astype(numpy_dtype(case.dtype))  # noqa: E731
    return Norms(scale(), scale(), 1e-5) if wanted else None


def decode_inputs(case: Any, *, parts: int = 0, norms: bool = False, seed: int = 0) -> Decode:
    """The first row is as long as its table allows, the second (of three or more) is at position 0."""
    rng = np.random.default_rng(seed)
    rows, size = case.rows, case.page_size
    pages = rows * case.pages + 1
    tables = rng.permutation(np.arange(1, pages)).reshape(rows, case.pages).astype(np.int32)
    positions = rng.integers(0, case.pages * size, rows).astype(np.int32)
    positions[0] = case.pages * size - 1
    if rows > 2:
        positions[1] = 0
    kv = np.full((pages, size, 2, case.kv_heads, case.head_dim), np.nan, numpy_dtype(case.dtype))
    for table, position in zip(tables, positions, strict=True):
        first = 0 if case.window is None else max(0, position - case.window + 1)
        for t in range(first, position):  # the new token's own place too is NaN still
            kv[table[t // size], t % size] = rng.standard_normal((2, case.kv_heads, case.head_dim))
    given = _projection(rng, rows, case, parts)
    return Decode(kv=kv, tables=tables, positions=positions, norms=_norms(rng, case, norms), **given)


def prefill_inputs(
    case: Any,
    spans: tuple[tuple[int, int], ...],
    bucket: int,
    block: int,
    *,
    parts: int = 0,
    norms: bool = False,
    seed: int = 0,
) -> Prefill:
    """spans: first position and number of new tokens of each sequence. Tokens before those lie in the cache already; the new
    ones' places are NaN. bucket: tokens with padding. block: most queries of one block."""
    rng = np.random.default_rng(seed)
    size = case.page_size
    needed = sum(-(-(start + n) // size) for start, n in spans)
    free = (1 + rng.permutation(needed)).tolist()
    kv = np.full((needed + 1, size, 2, case.kv_heads, case.head_dim), np.nan, numpy_dtype(case.dtype))
    columns, entries, blocks = [], [], []
    for sequence, (start, n) in enumerate(spans):
        for offset in range(0, n, block):
            blocks.append((len(columns) + offset, min(block, n - offset), start + offset, len(entries)))
        pages = [free.pop() for _ in range(-(-(start + n) // size))]
        entries += [(page, sequence, i * size) for i, page in enumerate(pages)]
        for t in range(start):
            kv[pages[t // size], t % size] = rng.standard_normal((2, case.kv_heads, case.head_dim))
        columns += [(t, sequence, pages[t // size] * size + t % size) for t in range(start, start + n)]
    tokens = len(columns)
    columns += [(0, -1, 0)] * (bucket - tokens)
    entries += [(0, -1, 0)] * 5
    blocks += [(0, 0, 0, 0)] * 2
    flat = lambda rows: np.ascontiguousarray(np.array(rows, np.int32).T)  # noqa: E731
    positions, sequences, index = flat(columns)
    lists = dict(page_list=flat(entries), blocks=flat(blocks), tokens=tokens)
    given = _projection(rng, bucket, case, parts)
    norm = _norms(rng, case, norms)
    return Prefill(kv=kv, positions=positions, sequences=sequences, index=index, norms=norm, **lists, **given)


def new_heads(given: Given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [N, H, D], k and v [N, K, D]: normed, rotated and rounded to the cache's dtype; as float64."""
    dtype, (kv_heads, size) = given.kv.dtype, given.kv.shape[3:]
    rounded = lambda x: x.astype(dtype).astype(np.float64)  # noqa: E731
    qkv = given.qkv.astype(np.float64)
    qkv = rounded(qkv.sum(0) if qkv.ndim == 3 else qkv)
    heads = qkv.reshape(len(qkv), given.heads + 2 * kv_heads, size)
    q, k, v = np.split(heads, [given.heads, given.heads + kv_heads], axis=1)
    if given.norms is not None:
        for x, scale in ((q, given.norms.q), (k, given.norms.k)):
            x[:] = rounded(
                rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + given.norms.eps)) * scale.astype(float)
            )
    turn = (given.rope[0].astype(np.float64) + 1j * given.rope[1])[:, None]
    for x in (q, k):
        z = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
        x[:] = rounded(np.concatenate([z.real, z.imag], axis=-1))
    return q, k, v


def written(given: Decode | Prefill) -> np.ndarray:
    """The cache, in its dtype, after the new tokens' keys and values have been stored; nothing else differs."""
    _, k, v = new_heads(given)
    kv, size = given.kv.copy(), given.kv.shape[1]
    for i, at in enumerate(given.index):
        kv[at // size, at % size] = np.stack([k[i], v[i]])
    return kv


def attention(
    q: np.ndarray,
    kv: np.ndarray,
    pages: np.ndarray,
    position: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
):
    """One query [H, D] float64 at `position`, against the tokens that lie in `pages`: [H, D]."""
    size, group = kv.shape[1], len(q) // kv.shape[3]
    t = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
    own = kv[pages[t // size], t % size].astype(np.float64)
    out = np.zeros_like(q)
    for head in range(len(q)):
        scores = own[:, 0, head // group] @ q[head] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        p = np.exp(scores - scores.max())
        out[head] = p / p.sum() @ own[:, 1, head // group]
    return out


def decode(
    given: Decode, *, scale: float, window: int | None, softcap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(outputs float64 [R, H, D], the cache afterwards)."""
    q, kv = new_heads(given)[0], written(given)
    rows = zip(q, given.tables, given.positions, strict=True)
    out = [
        attention(own, kv, table, int(position), scale=scale, window=window, softcap=softcap)
        for own, table, position in rows
    ]
    return np.stack(out), kv


def prefill(
    given: Prefill, *, scale: float, window: int | None, softcap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(outputs float64 [tokens, H, D] of the tokens that are no padding, the cache afterwards)."""
    q, kv = new_heads(given)[0], written(given)
    out = []
    for i in range(given.tokens):
        pages = given.page_list[0, given.page_list[1] == given.sequences[i]]
        out.append(attention(q[i], kv, pages, int(given.positions[i]), scale=scale, window=window, softcap=softcap))
    return np.stack(out), kv


def with_nan(given: Decode, rows: list[int]) -> Decode:
    """All that belongs to these rows is NaN."""
    kv, qkv = given.kv.copy(), given.qkv.copy()
    kv[given.tables[rows].ravel()] = np.nan
    qkv[..., rows, :] = np.nan
    return replace(given, kv=kv, qkv=qkv)
