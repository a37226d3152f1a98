"""Padded ranks, slice offsets, and the rule that picks tiles."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_jax.kernels import MAX_RANK, padded_rank, slice_offsets
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.lora_items import work_items
from lora_jax.kernels.skinny_matmul import skinny_matmul
from lora_jax.kernels.tuning import expand_tiles, shrink_tiles

ROWS = st.integers(1, 9000)
ITEMSIZES = st.sampled_from((2, 4))


def test_padded_rank() -> None:
    want = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 64: 64, 65: 128, 129: 256, 256: 256}
    assert {rank: padded_rank(rank) for rank in want} == want
    for rank in (0, -1, MAX_RANK + 1):
        with pytest.raises(ValueError, match=f"got {rank}"):
            padded_rank(rank)


def test_slice_offsets() -> None:
    assert slice_offsets((576, 192, 192)) == (0, 576, 768)
    assert slice_offsets((7,)) == (0,)


def is_power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@given(rows=ROWS, size=st.integers(1, 60000), ranks=st.integers(1, 768), itemsize=ITEMSIZES)
def test_shrink_tiles_cover_every_input_once(rows: int, size: int, ranks: int, itemsize: int) -> None:
    tiles = shrink_tiles(rows, size, ranks, itemsize)
    a_program = tiles.block_k * tiles.steps
    assert (tiles.parts - 1) * a_program < size <= tiles.parts * a_program, "a part of K is missing, or one is empty"
    assert ranks % tiles.block_c == 0
    assert 1 <= tiles.parts <= 32
    assert all(map(is_power, (tiles.block_t, tiles.block_c, tiles.block_k, tiles.num_warps)))
    if tiles.block_t > 1:
        operands = (tiles.block_t + max(tiles.block_c, 16)) * tiles.block_k * itemsize
        assert operands * tiles.num_stages <= 96 << 10, "more shared memory than the smallest card has"


@given(
    rows=ROWS,
    slices=st.lists(st.integers(1, 40000), min_size=1, max_size=3).map(tuple),
    rank=st.sampled_from([1 << i for i in range(9)]),
    itemsize=ITEMSIZES,
)
def test_expand_tiles(rows: int, slices: tuple[int, ...], rank: int, itemsize: int) -> None:
    tiles = expand_tiles(rows, slices, rank, itemsize)
    assert rank % tiles.block_r == 0
    assert all(map(is_power, (tiles.block_t, tiles.block_n, tiles.block_r, tiles.turns, tiles.num_warps)))
    assert tiles.turns == 1 or tiles.block_t == 1
    if tiles.block_t > 1:
        operands = max(tiles.block_r, 16) * (tiles.block_t + tiles.block_n) * 4  # widened to float32
        assert operands * tiles.num_stages <= 96 << 10, "more shared memory than the smallest card has"


@pytest.mark.parametrize(
    ("slots", "room", "message"),
    [
        ([-1], 8, "distinct and of the 3"),
        ([0, 0], 8, "distinct"),
        ([3], 8, "of the 3"),
        ([0, 1, 2], 4, "6 items in room for 4"),
    ],
)
def test_lists_that_cannot_be_made_are_refused(slots, room, message):
    with pytest.raises(ValueError, match=message):
        work_items(slots, np.full((2, 3), 20), 32, room)


def test_integers_are_no_weights():
    """They would be multiplied as such, and wrap around."""
    x, w = jnp.ones((2, 64), jnp.int8), jnp.ones((64, 64), jnp.int8)
    with pytest.raises(ValueError, match="x must be one of bfloat16"):
        skinny_matmul(x, w, interpret=True)
    kv = jnp.zeros((2, 16, 2, 1, 32), jnp.int32)
    rope = (jnp.ones((1, 16)), jnp.ones((1, 16)))
    with pytest.raises(ValueError, match="kv must be one of bfloat16"):
        decode_attention(
            jnp.zeros((1, 96)), rope, kv, jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), None, heads=1, scale=1.0
        )
