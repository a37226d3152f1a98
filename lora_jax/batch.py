"""From a plan to the arrays of a step. Warm-up and the avals of compilation go through the same code, with no rows.

Only this file and kv_cache.py make device inputs for a step; numpy here, the executable moves them. Every array is a new
one: a step in flight may still read those of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_jax.kernels.prefill_attention import BLOCK_TOKENS

from .config import CacheConfig, SchedulerConfig
from .kv_cache import TRASH_PAGE
from .plan import ScheduledRow
from .step_keys import StepKey


class RowTable:
    """The pages of each row's request, kept between steps so that a step gathers them. The last row is padding.

    block_tables: int32 [max_num_seqs + 1, P]; unused places hold the trash page.
    """

    def __init__(self, num_rows: int, max_pages_per_seq: int):
        self.block_tables = np.full((num_rows + 1, max_pages_per_seq), TRASH_PAGE, np.int32)
        self._known = [0] * num_rows  # pages of each row that its block table holds

    def start(self, row: int) -> None:
        """Another request has the row now."""
        self.block_tables[row] = TRASH_PAGE
        self._known[row] = 0

    def update(self, rows: Sequence[ScheduledRow]) -> None:
        """Take over pages that were added: a request keeps those it has until it gives up its row."""
        known = self._known
        for request, *_ in rows:
            row, n = request.row, len(request.pages)
            if known[row] != n:
                self.block_tables[row, known[row] : n] = request.pages[known[row] :]
                known[row] = n


def _runs(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of counts [n] things of n kinds, side by side: where each kind begins [n], and of each thing its kind and its number."""
    begin = np.cumsum(counts) - counts
    kind = np.repeat(np.arange(len(counts)), counts)
    return begin, kind, np.arange(len(kind)) - begin[kind]


@dataclass(frozen=True)
class BatchBuilder:
    """Builds padded int32 inputs. Padding rows read and write the trash page and have no adapter."""

    scheduler: SchedulerConfig
    cache: CacheConfig

    @property
    def max_pages_per_seq(self) -> int:
        return self.cache.pages_for(self.scheduler.max_model_len)

    def table(self) -> RowTable:
        """For a runtime of its own."""
        return RowTable(self.scheduler.max_num_seqs, self.max_pages_per_seq)

    def rows(self, rows: Sequence[ScheduledRow], bucket: int) -> np.ndarray:
        """[bucket]: the row that each sampled token goes to, max_num_seqs where there is none."""
        out = np.full(bucket, self.scheduler.max_num_seqs, np.int32)
        out[: len(rows)] = [row.request.row if row.samples else self.scheduler.max_num_seqs for row in rows]
        return out

    def indices(self, rows: Sequence[ScheduledRow], bucket: int) -> np.ndarray:
        """[bucket]: which token of its output each row is about to get."""
        out = np.zeros(bucket, np.int32)
        out[: len(rows)] = [row.index for row in rows]
        return out

    def decode(self, rows: Sequence[ScheduledRow], bucket: int, table: RowTable) -> np.ndarray:
        """meta [bucket, 2 + P]: position, row, block table. The tokens are on the device."""
        index = self.rows(rows, bucket)
        meta = np.empty((bucket, 2 + self.max_pages_per_seq), np.int32)
        meta[: len(rows), 0] = [row.start for row in rows]
        meta[len(rows) :, 0] = 0
        meta[:, 1] = index
        meta[:, 2:] = table.block_tables[index]
        return meta

    def prefill(
        self, rows: Sequence[ScheduledRow], bucket: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """tokens [bucket]; meta [3, bucket]: position, sequence (-1: padding), cache index; page_list [3, N]: page, its
        sequence (-1: unused), its first position; blocks [4, B] of queries: first token, tokens, position, first entry of the
        page list; last [2, max_prefill_seqs]: each sequence's last token, and the row that its sampled token goes to."""
        size, room = self.cache.page_size, self.scheduler.max_prefill_seqs
        tokens = np.zeros(bucket, np.int32)
        meta = np.zeros((3, bucket), np.int32)
        meta[1], meta[2] = -1, TRASH_PAGE * size
        page_list = np.zeros((3, self.cache.most_listed(self.scheduler)), np.int32)
        page_list[1] = -1
        blocks = np.zeros((4, -(-bucket // BLOCK_TOKENS) + room), np.int32)
        last = np.zeros((2, room), np.int32)
        last[1] = self.rows(rows, room)
        if not rows:
            return tokens, meta, page_list, blocks, last
        # one numpy call for all rows, not one a row: 64 short prompts would take longer than the device does
        counts = np.array([row.num_tokens for row in rows])
        starts = np.array([row.start for row in rows])
        pages = -(-(starts + counts) // size)
        _, sequence, offset = _runs(counts)
        listed, of_page, page_offset = _runs(pages)
        total, position = len(sequence), starts[sequence] + offset
        flat = np.fromiter(
            itertools.chain.from_iterable(row.request.pages[:n] for row, n in zip(rows, pages, strict=True)), np.int32
        )
        tokens[:total] = np.fromiter(
            itertools.chain.from_iterable(r.request.token_ids[r.start : r.start + r.num_tokens] for r in rows), np.int32
        )
        meta[0, :total], meta[1, :total] = position, sequence
        meta[2, :total] = flat[listed[sequence] + position // size] * size + position % size
        page_list[0, : len(flat)], page_list[1, : len(flat)], page_list[2, : len(flat)] = (
            flat,
            of_page,
            page_offset * size,
        )
        first = np.cumsum(counts) - counts
        _, of_block, block_offset = _runs(-(-counts // BLOCK_TOKENS))
        done = block_offset * BLOCK_TOKENS
        blocks[:, : len(of_block)] = (
            first[of_block] + done,
            np.minimum(counts[of_block] - done, BLOCK_TOKENS),
            starts[of_block] + done,
            listed[of_block],
        )
        last[0, : len(rows)] = first + counts - 1
        return tokens, meta, page_list, blocks, last

    def most_requests(self, key: StepKey) -> int:
        """That a decode or prefill step may hold."""
        return key.bucket if key.phase == "decode" else self.scheduler.max_prefill_seqs

    def slot_ids(self, rows: Sequence[ScheduledRow], bucket: int) -> np.ndarray:
        """[bucket]: each row's (decode) or token's (prefill) slot, -1 for base and padding."""
        ids = np.full(bucket, -1, np.int32)
        counts = [row.num_tokens for row in rows]
        ids[: sum(counts)] = np.repeat([row.request.slot for row in rows], counts) if rows else -1
        return ids

    def targets(self, rows: Sequence[ScheduledRow], bucket: int) -> np.ndarray:
        """[bucket]: the token after each token of a prefill, 0 where there is none: what prompt logprobs are about."""
        out = np.zeros(bucket, np.int32)
        at = 0
        for row in rows:
            following = row.request.token_ids[row.start + 1 : row.start + row.num_tokens + 1]
            out[at : at + len(following)] = following
            at += row.num_tokens
        return out
