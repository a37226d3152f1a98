"""Adapters in places of fewer ranks than theirs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels.lora_items import ITEM, work_items
from lora_jax.kernels.places import check_places
from lora_jax.kernels.tile_items import tile_items

from lora_jax.config import LoRAConfig
from tests.kernels.test_fused_lora import CASES, small
from tests.support import placed

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
@pytest.mark.parametrize("slices", [(48, 32, 32), (48, 48)])
def test_beside_a_product(slices, form):
    placed.check_tiles(slices, form)


def test_places_that_are_none_are_refused():
    for wrong in (jnp.zeros((2,), jnp.int32), jnp.zeros((2, 2)), jnp.zeros((0, 2), jnp.int32)):
        with pytest.raises(ValueError, match=r"op: places must be int32 \[S, C\]"):
            check_places("op", wrong, 16, 16)
    with pytest.raises(ValueError, match="op: places of 8 ranks, of which a slot has several, must be multiples of 16"):
        check_places("op", jnp.zeros((3, 2), jnp.int32), 8, 16)
    check_places("op", jnp.zeros((3, 1), jnp.int32), 8, 16)
    with pytest.raises(ValueError, match="no numbers for 3 slots of 1048577 places"):
        tile_items(np.zeros(16, np.int32), np.ones((1, 3), np.int32), 16, 16, 4, np.array([[1], [0], [1 << 20]]))


def test_rows_of_places_that_a_slot_lacks_are_rows_of_b():
    """What is loaded there is multiplied with zeros, so it has to be finite."""
    places = np.array([[1, -1], [2, 0]], np.int32)
    lists = work_items([0, 1], np.array([[17, 32]]), 32, 4, places)[0, : 4 * 16].reshape(4, 16)
    assert [line[0] for line in lists] == [16, 0, 32, 0] and lists.min() == 0


@pytest.mark.parametrize("rank", [1, 8, 12, 16, 17, 40, 64, 100, 256])
def test_places_of_the_engine_hold_whole_items(rank):
    config = LoRAConfig(2, rank, max_cpu_loras=2)
    assert config.places_of_slot == 1 or config.place_rank % ITEM == 0
