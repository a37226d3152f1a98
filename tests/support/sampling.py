"""Requests on rows, and the arrays that say how their tokens are chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from lora_jax.request import Request, SamplingParams
from lora_jax.sampling_inputs import RowSettings

V, SEQS = 64, 8


def request(row: int = 0, prompt: Any = (1, 2, 3), output: Any = (), eos=(), id: Any = "r", **params: Any) -> Request:
    out = Request(id, list(prompt), SamplingParams(**params), eos_token_ids=frozenset(eos), row=row)
    out.token_ids += output
    return out


def settings_of(requests, bucket: int, vocab: int = V, seed: int = 0):
    """(RowSettings with each request on a row of its own, those rows, the index of each request's next token)."""
    settings = RowSettings(bucket, vocab, seed)
    rows, index = np.full(bucket, bucket, np.int32), np.zeros(bucket, np.int32)
    for i, r in enumerate(requests):
        if r is not None:
            settings.put(i, r)
            rows[i], index[i] = i, r.num_output
    return settings, rows, index


def arrays(requests, bucket: int, vocab: int = V, seed: int = 0):
    settings, rows, index = settings_of(requests, bucket, vocab, seed)
    return settings.arrays(rows, index)


def rows_of(requests, bucket: int) -> np.ndarray:
    return np.array([SEQS if r is None else r.row for r in [*requests, *[None] * (bucket - len(requests))]], np.int32)
