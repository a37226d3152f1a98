"""From a plan to the arrays of a step. Warm-up and the avals of compilation go through the same code, with no rows.

Only this file and kv_cache.py make device inputs for a step; numpy here, the executable moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .config import CacheConfig, SchedulerConfig
from .kv_cache import TRASH_PAGE
from .scheduler import ScheduledRow


@dataclass(frozen=True)
class BatchBuilder:
    """Builds padded int32 inputs. Padding rows read and write the trash page and have no adapter."""

    scheduler: SchedulerConfig
    cache: CacheConfig

    @property
    def max_pages_per_seq(self) -> int:
        return self.cache.pages_for(self.scheduler.max_model_len)

    def page_list_len(self, bucket: int) -> int:
        """Most pages that one prefill plan can touch; see `Scheduler`."""
        return self.max_pages_per_seq + bucket // self.cache.page_size + self.scheduler.max_prefill_seqs

    def decode(self, rows: Sequence[ScheduledRow], bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens [bucket], meta [bucket, 1 + P]: position and block table."""
        tokens = np.zeros(bucket, np.int32)
        meta = np.full((bucket, 1 + self.max_pages_per_seq), TRASH_PAGE, np.int32)
        meta[:, 0] = 0
        for i, row in enumerate(rows):
            pages = row.request.pages
            tokens[i] = row.request.token_ids[row.start]
            meta[i, 0] = row.start
            meta[i, 1 : 1 + len(pages)] = pages
        return tokens, meta

    def prefill(
        self, rows: Sequence[ScheduledRow], bucket: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """tokens [bucket]; meta [3, bucket]: position, sequence (-1: padding), cache index; page_list [3, N]: page, its
        sequence (-1: unused), its first position; last [max_prefill_seqs]: each sequence's last token."""
        size = self.cache.page_size
        tokens = np.zeros(bucket, np.int32)
        meta = np.zeros((3, bucket), np.int32)
        meta[1], meta[2] = -1, TRASH_PAGE * size
        page_list = np.zeros((3, self.page_list_len(bucket)), np.int32)
        page_list[1] = -1
        last = np.zeros(self.scheduler.max_prefill_seqs, np.int32)
        at = listed = 0
        for i, row in enumerate(rows):
            n, request = row.num_tokens, row.request
            span = slice(at, at + n)
            positions = np.arange(row.start, row.start + n, dtype=np.int32)
            used = self.cache.pages_for(row.start + n)
            pages = np.asarray(request.pages[:used], np.int32)
            tokens[span] = request.token_ids[row.start : row.start + n]
            meta[0, span], meta[1, span] = positions, i
            meta[2, span] = pages[positions // size] * size + positions % size
            page_list[0, listed : listed + used] = pages
            page_list[1, listed : listed + used] = i
            page_list[2, listed : listed + used] = np.arange(used) * size
            last[i] = at + n - 1
            at, listed = at + n, listed + used
        return tokens, meta, page_list, last

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
