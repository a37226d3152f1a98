"""Adapters in places of fewer ranks than theirs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels.places import check_places
from lora_jax.kernels.tile_items import tile_items

from tests.kernels.test_fused_lora import CASES, small
from tests.support import placed
from tests.support.begun_checks import CASES as BEGUN

FUSED = [
    next(c for c in CASES if c.op == op and c.padded_rank == 64 and (c.rows > 16) == many)
    for op, many in (("skinny", False), ("skinny", True), ("swiglu", False), ("swiglu", True), ("residual", False))
]
LARGE = small("residual", 3, 64, (64,), "bfloat16", 100, 128, 5)
in_form = pytest.mark.parametrize("form", ["interpret", "xla"])


@in_form
@pytest.mark.parametrize("case", [*FUSED, LARGE], ids=lambda case: case.id)
def test_in_a_product(case, form):
    placed.check_product(case, form)


@in_form
@pytest.mark.parametrize("case", [c for c in BEGUN if c.padded_rank > 16], ids=lambda case: case.id)
def test_begun_by_attention(case, form):
    placed.check_begun(case, form)


@in_form
@pytest.mark.parametrize("slices", [(48, 32, 32), (48, 48)])
def test_beside_a_product(slices, form):
    placed.check_tiles(slices, form)


def test_places_that_are_none_are_refused():
    for wrong in (jnp.zeros((2,), jnp.int32), jnp.zeros((2, 2)), jnp.zeros((0, 2), jnp.int32)):
        with pytest.raises(ValueError, match=r"op: places must be int32 \[S, C\]"):
            check_places("op", wrong)
    with pytest.raises(ValueError, match="no numbers for 3 slots of 1048577 places"):
        tile_items(np.zeros(16, np.int32), np.ones((1, 3), np.int32), 16, 16, 4, np.array([[1], [0], [1 << 20]]))
