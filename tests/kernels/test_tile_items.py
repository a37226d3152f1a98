"""The lists that tiles of rows are given: every rank row that a tile needs once, and nothing else."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_jax.kernels.lora_items import ITEM
from lora_jax.kernels.tile_items import GROUP, OWNER, most_tile_items, tile_items


def listed(items: np.ndarray, tiles: int) -> list[list[list[int]]]:
    """Numbers of each item of each tile of one list; items that overlap or begin within a group are refused."""
    room, out, end = len(items) - tiles, [], 0
    for begin, count in items[room:, :2]:
        assert begin % GROUP == 0 and begin >= end and begin + count <= room
        out.append([[int(r) for r in items[begin + i] if r >= 0] for i in range(count)])
        end = begin + -(-count // GROUP) * GROUP
        assert (items[begin + count : end] == -1).all(), "a group ends with rows that are another tile's"
    assert end <= room
    return out


def needed(ids: list[int], ranks: np.ndarray, padded: int, block_t: int) -> list[list[list[int]]]:
    out = []
    for start in range(0, len(ids), block_t):
        used = sorted({s for s in ids[start : start + block_t] if s >= 0})
        rows = [(s, first, min(ITEM, ranks[s] - first)) for s in used for first in range(0, ranks[s], ITEM)]
        out.append([[(s << OWNER) + s * padded + first + i for i in range(n)] for s, first, n in rows])
    return out


@settings(deadline=None, max_examples=200)
@given(
    prompts=st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 40)), min_size=1, max_size=12),
    padding=st.integers(0, 40),
    ranks=st.lists(st.lists(st.integers(0, 64), min_size=5, max_size=5), min_size=1, max_size=3),
    block_t=st.sampled_from([16, 32]),
)
def test_every_tile_has_what_its_rows_need_and_there_is_room(prompts, padding, ranks, block_t):
    ids = [slot for slot, length in prompts for _ in range(length)] + [-1] * padding
    tiles, room = -(-len(ids) // block_t), most_tile_items(len(ids), block_t, len(prompts), 5, 64)
    lists = tile_items(np.array(ids, np.int32), np.array(ranks), 64, block_t, room)
    assert lists.dtype == np.int32 and lists.shape == (len(ranks), room + tiles, ITEM)
    for items, of_slot in zip(lists, ranks, strict=True):
        assert listed(items, tiles) == needed(ids, np.array(of_slot), 64, block_t)


@pytest.mark.parametrize(
    ("rows", "requests", "slots", "rank", "mib"),
    [(2048, 64, 8, 16, 0.1), (2048, 64, 32, 256, 0.6), (8192, 64, 32, 256, 1.5), (128, 128, 32, 64, 0.2)],
)
def test_lists_of_four_linears_stay_small(rows, requests, slots, rank, mib):
    """They travel to the device with every step."""
    room, tiles = most_tile_items(rows, 32, requests, slots, rank), -(-rows // 32)
    assert 4 * (room + tiles) * ITEM * 4 <= mib * 2**20


def test_the_worst_case_fits():
    """Requests of two rows, none alike, each crossing as many borders as it can."""
    ids = np.repeat(np.arange(-1, 63), 2)[1:-1].astype(np.int32)
    room = most_tile_items(len(ids), 16, 63, 63, 24)
    lists = tile_items(ids, np.full((1, 63), 24), 32, 16, room)
    assert len(listed(lists[0], 8)) == 8
    with pytest.raises(ValueError, match="room for 99"):
        tile_items(ids, np.full((1, 63), 24), 32, 16, 99)
    with pytest.raises(ValueError, match="rank of 33"):
        tile_items(ids, np.full((1, 63), 33), 32, 16, room)


def test_lists_of_a_large_step_are_quick():
    """Of four linears with ranks of their own: the device waits for them. About 0.2 ms; the bound is for a busy machine."""
    ids, ranks = (np.arange(2048) // 32 % 32).astype(np.int32), np.full((4, 32), 16) - np.arange(4)[:, None]
    room, took = most_tile_items(2048, 32, 64, 32, 16), []
    for _ in range(5):
        start = time.perf_counter()
        tile_items(ids, ranks, 16, 32, room)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.002
