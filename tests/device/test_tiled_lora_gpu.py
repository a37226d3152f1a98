"""Adapters beside products of many rows, compiled for the card. Run there: python -m pytest -m device tests/device"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.cases import LINEARS
from lora_jax.kernels.tiled_expand import lora_add
from lora_jax.kernels.tiled_lora import lora_shrink_tiles

from tests.support import tiled_lora_checks as checks
from tests.support.tiled_lora_checks import SLOTS, Case, mixed_ids

pytestmark = pytest.mark.device
TRITON: dict = {}
# Tiles of 32 rows and of 16, the last with fewer rows than that or not.
ROWS = [300, 100, 512]


def llama(name: str, rows: int) -> Case:
    linear = LINEARS[f"llama2-7b.{name}"]
    return Case(linear.slices, linear.inputs, mixed_ids(rows), jnp.bfloat16)


def some(rows: int) -> np.ndarray:
    """Rows to compare, both ends among them."""
    return np.unique(np.r_[0, np.random.default_rng(0).integers(0, rows, 40), rows - 1])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["o", "down"])
def test_add_equals_float64(name, rows):
    checks.check_add(llama(name, rows), TRITON, some(rows))


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul_equals_float64(rows):
    checks.check_silu_mul(llama("gate_up", rows), TRITON, some(rows))


@pytest.mark.parametrize(("rows", "normed"), [(300, False), (100, True)])
def test_rope_to_cache_equals_its_parts(rows, normed):
    checks.check_rope(Case((1024, 256, 256), 2048, mixed_ids(rows), jnp.bfloat16), TRITON, 8, 2, normed)


def test_float32_is_exact():
    ids = mixed_ids(150)
    checks.check_add(Case((128,), 576, ids, jnp.float32), TRITON)
    checks.check_silu_mul(Case((192, 192), 576, ids, jnp.float32), TRITON)
    checks.check_rope(Case((192, 64, 64), 576, ids, jnp.float32), TRITON, 6, 2, False)


@pytest.mark.parametrize("rows", [128, 256])
def test_bits_of_a_row_are_its_own(rows):
    """One program for all: which slots are in use changes no shape."""
    checks.check_row_bits(lambda ids: Case((1024,), 4096, ids, jnp.bfloat16), mixed_ids(rows), TRITON)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_broken_row_stays_alone(value):
    checks.check_broken_row(Case((1024,), 4096, mixed_ids(256), jnp.bfloat16), TRITON, 10, value)


def test_the_bits_do_not_depend_on_who_is_last():
    """200 calls, each with the arrivals that the one before leaves."""
    case = Case((1024,), 4096, np.arange(256) // 7 % SLOTS, jnp.bfloat16)
    arrivals, found = new_arrivals(case.adapters.room), []
    for _ in range(200):
        h, arrivals = lora_shrink_tiles(case.x, case.adapters, arrivals)
        found.append(lora_add(case.y, h, case.adapters))
    first, *others = map(np.asarray, found)
    assert all(first.tobytes() == other.tobytes() for other in others)
