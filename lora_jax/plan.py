"""The nouns of one step: what runs, on which rows and slots. Host only: never imports jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from .request import Request
from .step_keys import StepKey


class SlotSource(Protocol):
    """Device slots of adapters, as the scheduler needs them: held from `acquire` to the matching `release`."""

    def acquire(self, adapter: Any, /) -> tuple[int, bool] | None:
        """(slot, whether the weights must be written into it first), or None: running requests hold every slot."""
        ...

    def available(self, adapter: Any, /) -> bool:
        """Whether `acquire` would give a slot."""
        ...

    def keeps(self, adapter: Any, /) -> bool:
        """Whether nobody else can get the slot that the adapter has."""
        ...

    def release(self, adapter: Any, /) -> None:
        """Ends one `acquire`. The weights stay in the slot until somebody else needs it."""
        ...


class ScheduledRow(NamedTuple):
    """Tokens [start, start + num_tokens) of a request; samples: the last of them gives a new token, number `index` of the
    output. A decode row's token may be one that is still on the device alone."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    index: int


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step. slot_writes: (slot, adapter) pairs to be written on the device before it runs.

    prefill: at most max_prefill_seqs rows, max_num_batched_tokens tokens and `CacheConfig.most_listed` pages; only the last row
    may have samples False. decode: one token a row, all rows sample. begun: the requests that got their row in this plan.
    """

    phase: Literal["prefill", "decode"]
    rows: list[ScheduledRow]
    key: StepKey
    slot_writes: list[tuple[int, Any]] = field(default_factory=list)
    begun: list[Request] = field(default_factory=list)


@dataclass(frozen=True)
class SchedulerStats:
    """Counts of requests and pages; since the start of preemptions, and of tokens of requests that began, and of those found in
    the prefix cache. cached_pages: of the free ones, those that it holds."""

    running: int
    waiting: int
    preemptions: int
    free_pages: int
    cached_pages: int
    prefix_cache_queries: int
    prefix_cache_hits: int
