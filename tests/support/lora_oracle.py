"""What LoRA must compute, in numpy float64, with the error that each dtype may add. Independent of the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Slots = np.ndarray | Mapping[int, np.ndarray]

ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of the one rounding of the result
SMALLEST = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25}  # the same where float16 is subnormal
SUMS = 1e-6  # of float32 sums, relative to the sum of absolute terms
TF32 = 2.0**-10  # of h in a tensor-core product with narrower weights, relative to |h|


def delta(
    x: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    rank: int,
    widths: Sequence[int],
    h_rounding: float,
    rounded: np.dtype | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One row x [K], its a [n*rank, K] and b [rank, N] -> (delta [N], bound of its error [N]).

    h_rounding: how exactly h is multiplied with b, relative to |h|. rounded: for what h would give in that dtype.
    """
    h = a @ x
    h_error = SUMS * (np.abs(a) @ np.abs(x)) + h_rounding * np.abs(h)
    h = h if rounded is None else h.astype(rounded).astype(np.float64)
    value, error, start = np.zeros(b.shape[1]), np.zeros(b.shape[1]), 0
    for i, width in enumerate(widths):
        ranks, columns = slice(i * rank, (i + 1) * rank), slice(start, start + width)
        value[columns] = h[ranks] @ b[:, columns]
        error[columns] = h_error[ranks] @ np.abs(b[:, columns])
        start += width
    return value, error


def lora(
    x: np.ndarray, a: Slots, b: Slots, y: np.ndarray, slot_ids: np.ndarray, slices: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """x [T, K], a[slot] [n*R, K], b[slot] [R, N], y [T, N], all of one layer; -> (expected, bound of its error) [T, N].

    Rows of slot -1 have no error at all.
    """
    dtype = np.dtype(y.dtype).name
    x, y = (np.asarray(v).astype(np.float64) for v in (x, y))
    want, bound = y.copy(), np.zeros_like(y)
    for row, slot in enumerate(slot_ids):
        if slot >= 0:
            a_row, b_row = (np.asarray(w[slot]).astype(np.float64) for w in (a, b))
            h_rounding = SUMS if b[slot].dtype == np.float32 else TF32
            value, error = delta(x[row], a_row, b_row, b_row.shape[0], slices, h_rounding)
            want[row] += value
            bound[row] = error + 1.01 * ROUNDOFF[dtype] * (np.abs(want[row]) + error) + SMALLEST[dtype]
    return want, bound
