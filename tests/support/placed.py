"""The same adapters in places of fewer ranks, scattered, with junk in the places that are nobody's."""

from __future__ import annotations

from typing import Any

import numpy as np

Q = 16


def placed(a: Any, b: Any, slices: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(a [L, P, n * Q, K], b [L, P, Q, N], places [S, C]) of a [L, S, n * R, K] and b [L, S, R, N]."""
    a, b, rng = np.asarray(a), np.asarray(b), np.random.default_rng(seed)
    (layers, slots), count = b.shape[:2], b.shape[2] // Q
    total = slots * count + 3
    places = rng.permutation(total)[: slots * count].reshape(slots, count).astype(np.int32)
    out_a = rng.standard_normal((layers, total, slices * Q, a.shape[3])).astype(a.dtype)
    out_b = rng.standard_normal((layers, total, Q, b.shape[3])).astype(b.dtype)
    of_a, of_b = a.reshape(layers, slots, slices, count, Q, -1), b.reshape(layers, slots, count, Q, -1)
    for slot in range(slots):
        for i, place in enumerate(places[slot]):
            out_a[:, place] = of_a[:, slot, :, i].reshape(layers, slices * Q, -1)
            out_b[:, place] = of_b[:, slot, i]
    return out_a, out_b, places
