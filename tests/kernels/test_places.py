"""Adapters in places of fewer ranks than theirs: the same bits as in slots, which the other tests compare with float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels.lora_items import most_items, work_items
from lora_jax.kernels.places import check_places
from lora_jax.kernels.tile_items import most_tile_items, tile_items

from tests.kernels.test_fused_lora import CASES, small
from tests.support import begun_checks, fused_lora_checks, tiled_lora_checks
from tests.support.placed import placed

FUSED = [
    next(c for c in CASES if c.op == op and c.padded_rank == 64 and (c.rows > 16) == many)
    for op, many in (("skinny", False), ("skinny", True), ("swiglu", False), ("swiglu", True), ("residual", False))
]
LARGE = small("residual", 3, 64, (64,), "bfloat16", 100, 128, 5)
FORMS = {"interpret": dict(interpret=True), "xla": dict(implementation="xla")}


def moved(adapters: Any, ranks: np.ndarray, used: Any, padded_rank: int) -> Any:
    """Adapters of a step of few rows, in places."""
    a, b, places = placed(adapters.a, adapters.b, len(adapters.slices))
    items = work_items(used, ranks, padded_rank, most_items(ranks.shape[1], padded_rank), places)
    return dataclasses.replace(adapters, a=a, b=b, items=items, places=places)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [*FUSED, LARGE], ids=lambda case: case.id)
def test_in_a_product(case, form):
    slots = len(case.own_ranks)
    ids = [t % (slots + 1) - 1 for t in range(case.rows)] if case.rows > 1 else [0]
    given = fused_lora_checks.make(case, ids, case.layers - 1)
    used = tuple(dict.fromkeys(s for s in ids if s >= 0))
    adapters = moved(given.adapters, np.array(case.ranks), used, case.padded_rank)
    want, _ = fused_lora_checks.run(given, form)
    got, _ = fused_lora_checks.run(dataclasses.replace(given, adapters=adapters), form)
    if form == "interpret":
        rows = slice(None)
        assert fused_lora_checks.row_bits(got, rows) == fused_lora_checks.row_bits(want, rows)
    fused_lora_checks.check_result(given, got, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [c for c in begun_checks.CASES if c.padded_rank > 16], ids=lambda case: case.id)
def test_begun_by_attention(case, form):
    given = begun_checks.make(case)
    used = sorted({s for s in case.slots if s >= 0})
    ranks = np.array([case.ranks] * (begun_checks.LINEAR + 1), np.int32)
    adapters = moved(given.adapters, ranks, used, case.padded_rank)
    parts, totals = begun_checks.check(given, form)
    x, _, _, begun = begun_checks.attend(given, form, adapters)
    got = np.array(begun.begun)
    own = np.array([s >= 0 and case.ranks[s] > 0 for s in case.slots])
    product = begun_checks.product(given, x, form, begun)
    if form == "interpret":
        assert np.array_equal(got[:, own], parts[:, own]) and np.array_equal(product, totals)
    np.testing.assert_allclose(got.sum(0)[own], parts.sum(0)[own], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(product.astype(np.float32), totals.astype(np.float32), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slices", [(48, 32, 32), (48, 48)])
def test_beside_a_product(form, slices):
    checks = tiled_lora_checks
    case = checks.Case(slices, 64, checks.mixed_ids(150), jnp.bfloat16, 32)
    want = np.asarray(case.shrunk(FORMS[form]))
    a, b, places = placed(case.a, case.b, len(slices))
    ranks = np.stack([np.zeros_like(checks.RANKS), checks.RANKS])
    room = most_tile_items(150, 32, 150, checks.SLOTS, checks.PADDED)
    items = tile_items(case.ids, ranks, checks.PADDED, 32, room, places)
    case.adapters = dataclasses.replace(
        case.adapters, a=jnp.asarray(a), b=jnp.asarray(b), items=jnp.asarray(items), places=jnp.asarray(places)
    )
    got = np.asarray(case.shrunk(FORMS[form]))
    begin, count = items[1, room:, 0], items[1, room:, 1]
    used = np.concatenate([np.arange(s, s + n) for s, n in zip(begin, count, strict=True)])
    assert np.array_equal(got[:, :, used], want[:, :, used])
    checks.check_add(case, FORMS[form])
    if len(slices) == 2:
        checks.check_silu_mul(case, FORMS[form])


def test_places_that_are_none_are_refused():
    for wrong in (jnp.zeros((2,), jnp.int32), jnp.zeros((2, 2)), jnp.zeros((0, 2), jnp.int32)):
        with pytest.raises(ValueError, match=r"op: places must be int32 \[S, C\]"):
            check_places("op", wrong)
    with pytest.raises(ValueError, match="no numbers for 3 slots of 1048577 places"):
        tile_items(np.zeros(16, np.int32), np.ones((1, 3), np.int32), 16, 16, 4, np.array([[1], [0], [1 << 20]]))
