"""What the kernels of adapters beside products of many rows must compute, in float64; for interpreted and for compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.rope_cache import HeadNorms, lora_rope_to_cache, rope_to_cache
from lora_jax.kernels.tile_items import most_tile_items, tile_items
from lora_jax.kernels.tiled_expand import lora_add, lora_silu_mul
from lora_jax.kernels.tiled_lora import TileAdapters, lora_shrink_tiles
from lora_jax.kernels.tuning import ExpandCut, ShrinkCut

LAYERS, LAYER, PAGE = 2, 1, 8
RANKS = (16, 64, 8, 33, 1, 0)  # of the slots
SLOTS, PADDED = len(RANKS), 64


def mixed_ids(tokens: int) -> np.ndarray:
    """Prompts of 1 to 23 tokens in turn: none of them ends with a tile."""
    ids, turn = [], 0
    while len(ids) < tokens:
        ids += [(turn * 5) % (SLOTS + 1) - 1] * (1 + (turn * 7) % 23)
        turn += 1
    return np.array(ids[:tokens], np.int32)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], size: float = 1.0) -> np.ndarray:
    """A prime number of values, repeated: no two adapters are alike."""
    return np.resize(size * rng.standard_normal(1_000_003, np.float32), shape)


class Case:
    """One linear with adapters of RANKS, whose rank rows above their own hold large values that nobody may read."""

    def __init__(self, slices: Sequence[int], inputs: int, ids: Any, dtype: Any, block_t: int | None = None):
        rng, self.slices, self.ids = np.random.default_rng(0), tuple(slices), np.asarray(ids, np.int32)
        n, tokens, outputs = len(self.slices), len(ids), sum(slices)
        a = _normal(rng, (LAYERS, SLOTS, n, PADDED, inputs), inputs**-0.5)
        b = _normal(rng, (LAYERS, SLOTS, PADDED, outputs))
        for slot, rank in enumerate(RANKS):
            a[:, slot, :, rank:] = b[:, slot, rank:] = 1000
        self.a, self.b = (jnp.asarray(v, dtype) for v in (a.reshape(LAYERS, SLOTS, n * PADDED, inputs), b))
        self.x = jnp.asarray(_normal(rng, (tokens, inputs)), dtype)
        self.y = jnp.asarray(_normal(rng, (tokens, outputs)), dtype).at[:, 3].set(-0.0)
        ids, layer = jnp.asarray(self.ids), jnp.int32(LAYER)
        block_t = block_t or TileAdapters.of(self.a, self.b, ids, None, layer, self.slices, 1).block_t
        ranks = np.stack([np.zeros_like(RANKS), RANKS])
        room = most_tile_items(tokens, block_t, tokens, SLOTS, PADDED)
        items = jnp.asarray(tile_items(self.ids, ranks, PADDED, block_t, room))
        self.adapters = TileAdapters(self.a, self.b, ids, items, layer, self.slices, 1, block_t)

    def sums(self, rows: Any = slice(None)) -> np.ndarray:
        """y + x A^T B of some rows."""
        x, out = (np.asarray(v[rows], np.float64) for v in (self.x, self.y))
        for t, slot in enumerate(self.ids[rows]):
            rank, start = RANKS[slot] if slot >= 0 else 0, 0
            for i, width in enumerate(self.slices if rank else ()):
                a = np.asarray(self.a[LAYER, slot, i * PADDED : i * PADDED + rank], np.float64)
                b = np.asarray(self.b[LAYER, slot, :rank, start : start + width], np.float64)
                out[t, start : start + width] += (a @ x[t]) @ b
                start += width
        return out

    def shrunk(self, form: dict, cut: ShrinkCut | None = None):
        """h; counters are zeros again."""
        arrivals = new_arrivals(self.adapters.room)
        h, arrivals = lora_shrink_tiles(self.x, self.adapters, arrivals, cut=cut, **form)
        assert not np.asarray(arrivals).any()
        return h

    def added(self, form: dict, cut: ShrinkCut | None = None, expand: ExpandCut | None = None) -> np.ndarray:
        return np.asarray(lora_add(self.y, self.shrunk(form, cut), self.adapters, cut=expand, **form))


def close(got: Any, want: np.ndarray, dtype: Any) -> None:
    """But for the rounding of the result: h has 16 bits and more."""
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    relative, absolute = (2.0**-8, 1e-4) if dtype == jnp.bfloat16 else (2.0**-20, 2e-5)
    np.testing.assert_allclose(got, want, rtol=1.01 * relative, atol=absolute * np.abs(want).max())


def check_add(case: Case, form: dict, rows: Any = slice(None), cut: ShrinkCut | None = None) -> None:
    """Also that rows without an adapter keep the product's bits; plain JAX adds zeros."""
    got, dtype = case.added(form, cut), case.y.dtype
    close(got[rows], case.sums(rows), dtype)
    without = (case.ids < 0) | np.isin(case.ids, np.flatnonzero(np.array(RANKS) == 0))
    bits = lambda v: np.asarray(v)[without].tobytes()  # noqa: E731
    assert form.get("implementation") == "xla" or bits(got) == bits(case.y)


def check_silu_mul(case: Case, form: dict, rows: Any = slice(None), cut: ShrinkCut | None = None) -> None:
    got, dtype = lora_silu_mul(case.y, case.shrunk(form, cut), case.adapters, **form)[rows], case.y.dtype
    gate, up = np.split(case.sums(rows), 2, 1)
    if dtype == jnp.float32:
        return close(got, gate / (1 + np.exp(-gate)) * up, dtype)
    # the roundings of gate, silu(gate) and up
    gate, up = (np.asarray(jnp.asarray(v, dtype), np.float64) for v in (gate, up))
    want = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-6, atol=1e-2 * np.abs(want).max() ** 0.5)


def check_rope(case: Case, form: dict, heads: int, kv_heads: int, normed: bool, cut: ShrinkCut | None = None) -> None:
    """As the two kernels in its place, whose own tests hold them to an oracle."""
    rng, dtype, tokens = np.random.default_rng(3), case.y.dtype, len(case.ids)
    size = case.slices[1] // kv_heads
    pages = -(-tokens // PAGE) + 2  # page 0 is nobody's: interpreted, masked stores fall there
    kv = jnp.asarray(rng.standard_normal((pages, PAGE, 2, kv_heads, size), np.float32), dtype)
    index = jnp.asarray(PAGE + rng.permutation((pages - 1) * PAGE)[:tokens], jnp.int32)
    angles = rng.standard_normal((tokens, size // 2))
    rope = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    norms = HeadNorms(*(jnp.asarray(rng.standard_normal(size), dtype) for _ in range(2)), 1e-5) if normed else None
    options = dict(heads=heads, norms=norms)
    got = lora_rope_to_cache(case.y, case.shrunk(form, cut), case.adapters, rope, kv, index, **options, **form)
    sums = jnp.asarray(case.sums(), dtype)
    want = rope_to_cache(sums, rope, kv, index, implementation="xla", **options)
    for mine, other in zip(got, want, strict=True):  # queries, then pages
        mine, other = (np.asarray(v, np.float64) for v in (mine, other))
        bound = 2.0**-6 if dtype == jnp.bfloat16 else 1e-4
        np.testing.assert_allclose(mine, other, rtol=bound, atol=bound * np.abs(other).max() / 2)


def check_row_bits(make: Any, ids: np.ndarray, form: dict, **cuts: Any) -> None:
    """make(ids) -> Case. Each row alone with those of its slot, and with all, wherever its items lie among theirs."""
    together = make(ids).added(form, **cuts)
    for slot in range(-1, SLOTS):
        alone = make(np.where(ids == slot, ids, -1)).added(form, **cuts)
        assert together[ids == slot].tobytes() == alone[ids == slot].tobytes(), f"slot {slot}"


def check_broken_row(case: Case, form: dict, row: int, value: float) -> None:
    """One input of one row is no number: no other row's bits change."""
    sound, case.x = case.added(form), case.x.at[row, 5].set(value)
    broken = case.added(form)
    others = np.arange(len(case.ids)) != row
    assert broken[others].tobytes() == sound[others].tobytes()
    assert not np.isfinite(broken[row].astype(np.float32)).all()
