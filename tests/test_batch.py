"""Device inputs of a step: padding, block tables that are kept between steps, and arrays that nobody changes later."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lora_jax.kernels.prefill_attention import BLOCK_TOKENS

from lora_jax.batch import BatchBuilder
from lora_jax.config import CacheConfig, SchedulerConfig
from lora_jax.plan import ScheduledRow
from lora_jax.request import Request, SamplingParams
from lora_jax.step_keys import StepKey

BUILDER = BatchBuilder(SchedulerConfig(3, 16, 20), CacheConfig(4, 30))
PAD = 3


def request(row: int, pages: list[int], prompt: int = 5) -> Request:
    made = Request("r", list(range(10, 10 + prompt)), SamplingParams(), row=row, slot=row - 1)
    made.pages = pages
    return made


def decode(table, *rows: ScheduledRow, bucket: int = 4) -> list[list[int]]:
    table.update(rows)
    meta = BUILDER.decode(rows, bucket, table)
    assert meta.shape == (bucket, 2 + 5) and meta.dtype == np.int32
    return meta.tolist()


def test_decode_gathers_positions_rows_and_pages():
    table = BUILDER.table()
    two, zero = request(2, [7, 8]), request(0, [9])
    padding = [0, PAD, 0, 0, 0, 0, 0]
    got = decode(table, ScheduledRow(two, 5, 1, True, 1), ScheduledRow(zero, 2, 1, True, 0))
    assert got == [[5, 2, 7, 8, 0, 0, 0], [2, 0, 9, 0, 0, 0, 0], padding, padding]
    two.pages.append(3)
    assert decode(table, ScheduledRow(two, 8, 1, True, 4))[0] == [8, 2, 7, 8, 3, 0, 0]
    table.start(2)
    assert decode(table, ScheduledRow(request(2, [4, 5]), 4, 1, True, 0))[0] == [4, 2, 4, 5, 0, 0, 0]
    assert decode(table) == [padding] * 4


def test_how_many_requests_a_step_may_hold():
    """There is room for the adapters of so many."""
    builder = BatchBuilder(SchedulerConfig(100, 2048, 2048), CacheConfig(16, 300))
    assert builder.most_requests(StepKey("decode", 32, lora=True)) == 32
    assert builder.most_requests(StepKey("prefill", 2048, lora=True)) == builder.scheduler.max_prefill_seqs >= 64


def test_a_step_in_flight_keeps_its_arrays():
    table, mine = BUILDER.table(), request(1, [7])
    row = ScheduledRow(mine, 3, 1, True, 0)
    table.update([row])
    meta = BUILDER.decode([row], 1, table)
    before = meta.tolist()
    table.start(1)
    mine.pages.append(8)
    table.update([row])
    assert meta.tolist() == before == [[3, 1, 7, 0, 0, 0, 0]]


def test_only_rows_that_sample_get_a_token():
    rows = [ScheduledRow(request(2, [1, 2]), 0, 5, True, 3), ScheduledRow(request(1, [3]), 0, 4, False, 0)]
    assert BUILDER.rows(rows, 4).tolist() == [2, PAD, PAD, PAD]
    assert BUILDER.indices(rows, 4).tolist() == [3, 0, 0, 0]
    assert BUILDER.slot_ids(rows, 12).tolist() == [1] * 5 + [0] * 4 + [-1] * 3
    assert BUILDER.targets(rows, 12).tolist() == [11, 12, 13, 14, 0, 11, 12, 13, 14, 0, 0, 0]


def test_prefill_places_each_token():
    rows = [ScheduledRow(request(2, [1, 2]), 3, 2, True, 0), ScheduledRow(request(1, [3]), 0, 1, False, 0)]
    tokens, meta, page_list, blocks, last = BUILDER.prefill(rows, 4)
    assert tokens.tolist() == [13, 14, 10, 0] and last.tolist() == [[1, 2, 0], [2, PAD, PAD]]
    assert meta.tolist() == [[3, 4, 0, 0], [0, 0, 1, -1], [1 * 4 + 3, 2 * 4, 3 * 4, 0]]
    assert page_list[:, :4].tolist() == [[1, 2, 3, 0], [0, 0, 1, -1], [0, 4, 0, 0]]
    assert blocks[:, :3].T.tolist() == [[0, 2, 3, 0], [2, 1, 0, 2], [0, 0, 0, 0]]


@given(
    start=st.integers(0, 200),
    counts=st.lists(st.integers(1, 3 * BLOCK_TOKENS), max_size=4),
    padding=st.integers(0, 70),
    page_size=st.sampled_from([1, 4, 16, 64]),
    rng=st.randoms(use_true_random=False),
)
def test_blocks_hold_every_token_once(start, counts, padding, page_size, rng):
    """Each block lies in one sequence, and from its entry on the page list says where the block's keys are."""
    bucket = max(1, sum(counts) + padding)
    builder = BatchBuilder(SchedulerConfig(4, bucket, 1000), CacheConfig(page_size, 2000))
    rows, wanted = [], []
    for i, n in enumerate(counts):
        first = start if i == 0 else 0
        pages = [rng.randrange(1, 2000) for _ in range(builder.cache.pages_for(first + n + rng.randrange(40)))]
        rows.append(ScheduledRow(request(i, pages, first + n), first, n, True, 0))
        wanted += [(i, position, pages) for position in range(first, first + n)]
    _, (positions, sequences, index), page_list, blocks, last = builder.prefill(rows, bucket)
    assert blocks.dtype == np.int32 and blocks.shape == builder.prefill((), bucket)[3].shape
    seen = []
    for at, tokens, position, entry in blocks.T.tolist():
        assert 0 <= tokens <= BLOCK_TOKENS
        for i in range(at, at + tokens):
            sequence, expected, pages = wanted[i]
            assert (sequences[i], positions[i], position + i - at) == (sequence, expected, expected)
            page = expected // page_size
            assert index[i] == pages[page] * page_size + expected % page_size
            seen.append(i)
        if tokens:  # every page that the block's last token reads
            used = slice(entry, entry + page + 1)
            assert page_list[0, used].tolist() == pages[: page + 1]
            assert (page_list[1, used] == sequence).all()
            assert page_list[2, used].tolist() == [p * page_size for p in range(page + 1)]
    assert last.T[: len(rows)].tolist() == [[sum(counts[: i + 1]) - 1, i] for i in range(len(rows))]
    assert (last[1, len(rows) :] == 4).all()
    assert seen == list(range(len(wanted))) and (sequences[len(wanted) :] == -1).all()
