"""Adapters in places, compiled for the card: the bits of slots. Run there: python -m pytest -m device tests/device"""

from __future__ import annotations

import pytest

from tests.support import placed
from tests.support.fused_lora_checks import Case

pytestmark = pytest.mark.device


@pytest.mark.parametrize(
    ("op", "rows"), [("skinny", 8), ("skinny", 64), ("residual", 8), ("swiglu", 8), ("swiglu", 64)]
)
def test_in_a_product(op, rows):
    slices = {"skinny": (1024, 256, 256), "residual": (1024,), "swiglu": (1024, 1024)}[op]
    placed.check_product(Case(op, rows, 2048, slices, "bfloat16"), "triton")


@pytest.mark.parametrize("slices", [(48, 32, 32), (48, 48)])
def test_beside_a_product(slices):
    placed.check_tiles(slices, "triton")
