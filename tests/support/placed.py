"""Adapters in places of fewer ranks than theirs, scattered, with junk in the places that are nobody's: the same bits as in slots,
which other checks compare with float64. Each `check_` raises AssertionError."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from lora_jax.kernels.lora_items import most_items, work_items
from lora_jax.kernels.tile_items import most_tile_items, tile_items

from . import fused_lora_checks, tiled_lora_checks

Q = 16
FORMS: dict[str, dict] = {"interpret": dict(interpret=True), "xla": dict(implementation="xla"), "triton": {}}


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


def moved(adapters: Any, ranks: np.ndarray, used: Any, padded_rank: int) -> Any:
    """Adapters of a step of few rows, in places."""
    a, b, places = placed(adapters.a, adapters.b, len(adapters.slices))
    items = work_items(used, ranks, padded_rank, most_items(ranks.shape[1], padded_rank), places)
    return dataclasses.replace(adapters, a=a, b=b, items=items, places=places)


def check_product(case: fused_lora_checks.Case, form: str) -> None:
    """Inside a product."""
    slots = len(case.own_ranks)
    ids = [t % (slots + 1) - 1 for t in range(case.rows)] if case.rows > 1 else [0]
    given = fused_lora_checks.make(case, ids, case.layers - 1)
    used = tuple(dict.fromkeys(s for s in ids if s >= 0))
    adapters = moved(given.adapters, np.array(case.ranks), used, case.padded_rank)
    want, _ = fused_lora_checks.run(given, form)
    got, _ = fused_lora_checks.run(dataclasses.replace(given, adapters=adapters), form)
    if form != "xla":
        rows = slice(None)
        assert fused_lora_checks.row_bits(got, rows) == fused_lora_checks.row_bits(want, rows)
    fused_lora_checks.check_result(given, got, form)


def check_tiles(slices: tuple[int, ...], form: str) -> None:
    """Beside a product of many rows."""
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
