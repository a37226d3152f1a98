"""Attention that begins the adapters of the linear after it, interpreted and in plain JAX, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support import begun_checks as checks


@pytest.mark.parametrize("form", ["interpret", "xla"])
@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: case.id)
def test_attention_begins_what_the_next_linear_ends(case, form):
    checks.check(checks.make(case), form)


@pytest.mark.parametrize("case", [checks.CASES[0], checks.CASES[5]], ids=lambda case: case.id)
def test_a_rows_bits_depend_on_itself(case):
    """Other rows change their adapters or lose them, the list turns round, a row breaks: the last row keeps its bits."""
    found = [checks.check(checks.make(case), "interpret")]
    alone = dataclasses.replace(case, slots=(*(-1 for _ in case.slots[:-1]), case.slots[-1]))
    found.append(checks.check(checks.make(alone), "interpret"))
    given = checks.make(case, seed=1)  # other weights everywhere but in the last row's slot, the list in another order
    for name in ("a", "b"):
        getattr(given.adapters, name)[:, case.slots[-1]] = getattr(checks.make(case).adapters, name)[:, case.slots[-1]]
    found.append(checks.check(given, "interpret"))
    for parts, totals in found[1:]:
        assert (parts[:, -1] == found[0][0][:, -1]).all() and (totals[-1] == found[0][1][-1]).all()


def test_a_broken_row_breaks_itself_alone():
    case = checks.CASES[0]
    want = checks.check(checks.make(case), "interpret")[1]
    given = checks.make(case)
    given.attention[0][:, 1] = np.nan
    out, _, _, adapters = checks.attend(given, "interpret", given.adapters)
    got = checks.product(given, out, "interpret", adapters)
    others = [0, 2, 3, 4]
    assert np.isnan(got[1]).all() and (got[others] == want[others]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(slots=(0,) * 17), "at most 16 rows"),
        (dict(ranks=(128,), slots=(0,), padded_rank=128), "rank 64"),
    ],
    ids=str,
)
def test_what_it_cannot_take_is_named(changes, message):
    given = checks.make(dataclasses.replace(checks.CASES[0], **changes))
    with pytest.raises(ValueError, match=message):
        checks.attend(given, "interpret", given.adapters)


def test_a_wrong_begun_is_named():
    given = checks.make(checks.CASES[0])
    out: Any = checks.attend(given, "xla", None)[0]
    for begun in (np.zeros((8, 5, 8), np.float32), np.zeros((8, 4, 16), np.float32), np.zeros((8, 5, 16), np.float16)):
        with pytest.raises(ValueError, match="begun must be float32"):
            checks.product(given, out, "interpret", dataclasses.replace(given.adapters, begun=begun))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(linear=2), "items must be int32"),
        (dict(linear=-1), "items must be int32"),
        (dict(items=np.zeros((2, 80), np.float32)), "items must be int32"),
        (dict(items=np.zeros((2, 100), np.int32)), "J a multiple of 4"),
        (dict(b=np.zeros((2, 3, 32, 256), np.float32)), "b must be"),
    ],
    ids=str,
)
def test_operands_that_attention_only_passes_on_are_looked_at_too(changes, message):
    given = checks.make(checks.CASES[0])
    with pytest.raises(ValueError, match=message):
        checks.attend(given, "interpret", dataclasses.replace(given.adapters, **changes))
