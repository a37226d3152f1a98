"""The kernels of adapters beside products of many rows, interpreted and in plain JAX, against float64."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels import tiled_expand
from lora_jax.kernels.rope_cache import lora_rope_to_cache
from lora_jax.kernels.tiled_expand import lora_add, lora_silu_mul
from lora_jax.kernels.tiled_lora import fits_tiles, lora_shrink_tiles
from lora_jax.kernels.tuning import ExpandCut, ShrinkCut, expand_cut, shrink_cut, tile_rows

from tests.support import tiled_lora_checks as checks
from tests.support.tiled_lora_checks import SLOTS, Case, mixed_ids

SLICES = {"qkv": (128, 64, 64), "heads": (192, 64, 64), "o": (128,), "gate_up": (192, 192)}
INPUTS = 192
CASES = {
    "mixed": (mixed_ids(150), 32),
    "mixed, long tiles": (mixed_ids(150), 64),
    "each row another": (np.arange(64) % (SLOTS + 1) - 1, 16),
    "one": (np.full(70, 3), 32),
    "a tile without": (np.r_[np.full(32, -1), np.full(40, 1)], 32),
    "none": (np.full(40, -1), 16),
}
FORMS = {"xla": dict(implementation="xla"), "triton": dict(interpret=True)}
PARTS = ShrinkCut(2, 32, 3, 4, 3)


def make(name: str, ids, block_t: int, dtype) -> Case:
    return Case(SLICES[name], INPUTS, ids, dtype, block_t)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_add(name, form, dtype):
    checks.check_add(make("qkv", *CASES[name], dtype), FORMS[form], cut=PARTS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_silu_mul(name, form, dtype):
    checks.check_silu_mul(make("gate_up", *CASES[name], dtype), FORMS[form], cut=PARTS)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["mixed", "a tile without", "none"])
def test_rope_to_cache(name, dtype, normed):
    checks.check_rope(make("heads", *CASES[name], dtype), FORMS["triton"], 6, 2, normed)


@pytest.mark.parametrize("form", FORMS)
def test_rope_to_cache_where_half_a_head_is_too_small(form):
    """16 dimensions, 24: two kernels."""
    checks.check_rope(make("heads", mixed_ids(70), 32, jnp.float32), FORMS[form], 12, 4, False)
    checks.check_rope(Case((96, 48, 48), INPUTS, mixed_ids(70), jnp.bfloat16), FORMS[form], 4, 2, True)


@pytest.mark.parametrize(("group", "parts"), [(1, 1), (1, 2), (2, 1), (2, 6)])
@pytest.mark.parametrize("name", ["o", "gate_up"])
def test_cuts(name, group, parts):
    case = make(name, mixed_ids(100), 32, jnp.bfloat16)
    checks.close(
        case.added(FORMS["triton"], ShrinkCut(group, 32, parts, 4, 3), ExpandCut(64, 4, 3)), case.sums(), jnp.bfloat16
    )


@pytest.mark.parametrize(("rows", "listed"), [(151, 2), (152, 4)])
def test_more_items_than_are_listed_at_a_time(monkeypatch, rows, listed):
    """Of numbers of rows that no other test has, for what was traced is kept."""
    monkeypatch.setattr(tiled_expand, "LISTED", listed)
    case = make("gate_up", mixed_ids(rows), 32, jnp.bfloat16)
    counts = np.asarray(case.adapters.items)[:, case.adapters.room :, 1]
    assert counts.max() > listed and (counts % listed).any()
    checks.check_add(case, FORMS["triton"], cut=PARTS)
    checks.check_silu_mul(case, FORMS["triton"], cut=PARTS)


@pytest.mark.parametrize("group", [1, 2])
def test_bits_of_a_row_are_its_own(group):
    cuts = dict(cut=ShrinkCut(group, 32, 3, 4, 3), expand=ExpandCut(64, 4, 3))
    checks.check_row_bits(lambda ids: make("o", ids, 32, jnp.bfloat16), mixed_ids(128), FORMS["triton"], **cuts)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_broken_row_stays_alone(value):
    checks.check_broken_row(make("o", mixed_ids(64), 32, jnp.bfloat16), FORMS["triton"], 10, value)


def test_tiles_and_cuts():
    """Those measured on a card (docs/performance.md)."""
    assert [tile_rows(rows, 2) for rows in (65, 128, 256, 2048, 8192)] == [16, 16, 16, 32, 32]
    assert tile_rows(2048, 4) == 16
    assert shrink_cut(2048, 4096, 32, 3, 2) == ShrinkCut(1, 128, 4, 4, 3)
    assert shrink_cut(256, 11008, 16, 1, 2) == ShrinkCut(2, 128, 8, 4, 3)
    assert shrink_cut(2048, 576, 32, 1, 2)[:3] == (2, 64, 2)
    assert expand_cut((4096,), 32) == ExpandCut(128, 4, 3) and expand_cut((576, 192, 192), 32).block_n == 64


def test_which_linears_fit():
    assert fits_tiles(576, (576, 192, 192), jnp.bfloat16) and fits_tiles(16, (48,), jnp.float32)
    assert not fits_tiles(576, (576,), jnp.float16)
    assert not fits_tiles(100, (64,), jnp.bfloat16) and not fits_tiles(64, (64, 24), jnp.bfloat16)
    assert not fits_tiles(64, (64,) * 5, jnp.bfloat16)


def test_wrong_operands_are_named():
    case = make("o", mixed_ids(64), 32, jnp.bfloat16)
    h, adapters = case.shrunk(FORMS["xla"]), case.adapters
    arrivals = jnp.zeros(adapters.room, jnp.int32)
    change = lambda **fields: dataclasses.replace(adapters, **fields)  # noqa: E731
    for match, call in {
        "x must be": lambda: lora_shrink_tiles(case.x[:, :64], adapters, arrivals),
        "arrivals must be": lambda: lora_shrink_tiles(case.x, adapters, arrivals[:1]),
        "slot_ids must be": lambda: lora_shrink_tiles(case.x, change(slot_ids=adapters.slot_ids[:63]), arrivals),
        "items must be": lambda: lora_shrink_tiles(case.x, change(linear=2), arrivals),
        "needs a": lambda: lora_shrink_tiles(case.x, change(slices=(64, 64)), arrivals),
        "block_t must be": lambda: lora_shrink_tiles(case.x, change(block_t=24), arrivals),
        "must divide K": lambda: lora_shrink_tiles(case.x, adapters, arrivals, cut=ShrinkCut(2, 128, 1, 4, 3)),
        "groups of 4": lambda: lora_shrink_tiles(case.x, adapters, arrivals, cut=ShrinkCut(4, 64, 1, 4, 3)),
        "y must be": lambda: lora_add(case.y.astype(jnp.float32), h, adapters),
        "h must be": lambda: lora_add(case.y, h[:, :1], adapters),
        "columns must divide": lambda: lora_add(case.y, h, adapters, cut=ExpandCut(96, 4, 3)),
        r"slices must be \(F, F\)": lambda: lora_silu_mul(case.y, h, adapters),
        "slices must be those of q": lambda: lora_rope_to_cache(
            case.y, h, adapters, (jnp.zeros((64, 16)),) * 2, jnp.zeros((9, 8, 2, 1, 32), jnp.bfloat16), adapters.slot_ids, heads=2
        ),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()
