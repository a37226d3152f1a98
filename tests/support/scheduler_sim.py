"""A slow, obvious engine around the scheduler: a fake device, fake adapter slots, and an oracle that runs alone.

The fake device holds what a real one would: pages, slots, per-row state, the last token of each row. Its "model" is a hash
of all (token, adapter) pairs that it finds in a request's pages, so that a wrong page, slot, chunk, row or token gives other
tokens than `solo`. Decode steps take their tokens from the device; what a step gives may be resolved one plan later.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass

from lora_jax.config import CacheConfig, SchedulerConfig
from lora_jax.plan import ScheduledRow, StepPlan
from lora_jax.request import FinishReason, Request, SamplingParams
from lora_jax.scheduler import Scheduler


@dataclass(frozen=True, eq=False)
class FakeAdapter:
    name: str

    @property
    def content_hash(self) -> str:
        return self.name


@dataclass(frozen=True)
class Rates:
    """One token in `stop` ends its request, one in `broken` is none: -1 (0: never)."""

    stop: int = 0
    broken: int = 0


def next_token(history: list[tuple[int, str]], rates: Rates) -> int:
    """The fake model."""
    token = zlib.crc32(repr(history).encode())
    return -1 if rates.broken and token % rates.broken == 1 else token


def end_of(output: list[int], max_tokens: int, stop_rate: int) -> FinishReason | None:
    """The fake engine's rule for ending a request."""
    if output[-1] < 0:
        return "abort"
    if stop_rate and output[-1] % stop_rate == 0:
        return "stop"
    return "length" if len(output) == max_tokens else None


def adapter_name(request: Request) -> str:
    return request.adapter.name if request.adapter else "base"


def solo(request: Request, rates: Rates) -> list[int]:
    """What the request gives when nothing else exists: no pages, no batch, no scheduler."""
    name = adapter_name(request)
    history = [(token, name) for token in request.prompt_token_ids]
    output: list[int] = []
    while not output or end_of(output, request.max_tokens, rates.stop) is None:
        output.append(next_token(history, rates))
        history.append((output[-1], name))
    return output


def awaits_end(request: Request) -> bool:
    """Whether its last token is in flight."""
    return len(request.token_ids) + request.pending == len(request.prompt_token_ids) + request.max_tokens


class FakeSlots:
    """Least recently used slots with pin counts, by a list instead of anything clever."""

    def __init__(self, num_slots: int):
        self.held: list[FakeAdapter | None] = [None] * num_slots
        self.recent = list(range(num_slots))  # least recent first
        self.pins: Counter[FakeAdapter] = Counter()

    def resident(self, adapter: FakeAdapter) -> bool:
        return adapter in self.held

    def available(self, adapter: FakeAdapter) -> bool:
        return self.resident(adapter) or any(held is None or not self.pins[held] for held in self.held)

    def acquire(self, adapter: FakeAdapter, /) -> tuple[int, bool] | None:
        if not self.available(adapter):
            return None
        must_write = not self.resident(adapter)
        if must_write:
            free = (s for s in self.recent if (held := self.held[s]) is None or not self.pins[held])
            self.held[next(free)] = adapter
        slot = self.held.index(adapter)
        self.recent.remove(slot)
        self.recent.append(slot)
        self.pins[adapter] += 1
        return slot, must_write

    def keeps(self, adapter: FakeAdapter, /) -> bool:
        return self.pins[adapter] > 0

    def release(self, adapter: FakeAdapter, /) -> None:
        assert self.pins[adapter] > 0, f"{adapter} released more often than acquired"
        self.pins[adapter] -= 1


class FakeDevice:
    """Pages of (token, adapter) entries, slots of adapters, one piece of state a row."""

    def __init__(self, cache: CacheConfig, rates: Rates):
        self.page_size, self.rates = cache.page_size, rates
        self.pages: dict[int, list[tuple[int, str] | None]] = {}
        self.slots: dict[int, FakeAdapter] = {}
        self.rows: dict[int, str] = {}  # whose sampling state a row holds: set when a request (re)starts
        self.last: dict[int, int] = {}  # each row's last token

    def lose_everything(self) -> None:
        self.pages.clear()
        self.slots.clear()
        self.rows.clear()
        self.last.clear()

    def run(self, plan: StepPlan) -> dict[str, int]:
        for slot, adapter in plan.slot_writes:
            self.slots[slot] = adapter
        self.rows.update({request.row: request.request_id for request in plan.begun})
        for row in plan.rows:
            self._write(row, plan.phase == "decode")
        sampled = {row.request.request_id: self._sample(row) for row in plan.rows if row.samples}
        self.last.update({row.request.row: sampled[row.request.request_id] for row in plan.rows if row.samples})
        return sampled

    def _write(self, row: ScheduledRow, decode: bool) -> None:
        request = row.request
        assert self.rows.get(request.row) == request.request_id, f"row {request.row} holds {self.rows.get(request.row)}"
        name = self.slots[request.slot].name if request.slot >= 0 else "base"
        for position in range(row.start, row.start + row.num_tokens):
            page = self.pages.setdefault(request.pages[position // self.page_size], [None] * self.page_size)
            token = max(self.last[request.row], 0) if decode else request.token_ids[position]
            page[position % self.page_size] = (token, name)

    def _sample(self, row: ScheduledRow) -> int:
        history = []
        for position in range(row.start + row.num_tokens):
            entry = self.pages[row.request.pages[position // self.page_size]][position % self.page_size]
            assert entry is not None, f"{row.request.request_id} reads position {position}, which was never written"
            history.append(entry)
        return next_token(history, self.rates)


class Simulation:
    """Drives a scheduler over the fake device, checks every step, collects what each request gave."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, num_slots: int = 0, rates: Rates = Rates(), loads: int = 0
    ):
        """loads: how many plans an adapter is asked for in before it can be written to a slot."""
        self.config, self.cache, self.rates, self.loads = config, cache, rates, loads
        self.slots = FakeSlots(num_slots) if num_slots else None
        self.scheduler = Scheduler(config, cache, self.slots, None, self._is_ready)
        self.asked: dict[FakeAdapter, set[int]] = {}  # in which plans, since it was last written to a slot
        self.not_ready: set[FakeAdapter] = set()  # at the last plan
        self.looks = 0
        self.device = FakeDevice(cache, rates)
        self.requests: list[Request] = []
        self.adapters: dict[str, FakeAdapter] = {}
        self.plans: list[StepPlan] = []
        self.in_flight: list[tuple[StepPlan, dict[str, int]]] = []  # at most one, with what the device gave
        self.admissions: list[str] = []  # request ids, also those admitted again
        self.head: Request | None = None  # the oldest request left waiting,
        self.passes = 0  # how many requests with adapters have passed it,
        self.may_drain: set[FakeAdapter] | None = None  # and the adapters that have not passed since that was too often
        self.preempted: Counter[str] = Counter()
        self.stalled = ("", 0)  # the oldest running request, and for how many steps in a row it did not advance

    def _is_ready(self, adapter: FakeAdapter) -> bool:
        assert self.slots is not None
        if self.slots.resident(adapter):
            return True
        asked = self.asked.setdefault(adapter, set())
        asked.add(self.looks)
        if len(asked) <= self.loads:
            self.not_ready.add(adapter)
        return adapter not in self.not_ready

    def add(self, num_prompt: int, max_tokens: int, adapter: str | None = None, common: int = 0) -> Request:
        """common: how many of the first tokens are those that all requests begin with."""
        n = len(self.requests)
        request = Request(
            f"r{n}",
            [zlib.crc32(f"{n if i >= common else 'all'}/{i}".encode()) % 1000 for i in range(num_prompt)],
            SamplingParams(max_tokens=max_tokens),
            adapter=self.adapters.setdefault(adapter, FakeAdapter(adapter)) if adapter else None,
        )
        request.max_tokens = max_tokens
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        """One engine step, where there is something to do."""
        plan = self.try_step()
        assert plan is not None
        return plan

    def try_step(self, *, abort_in_flight: str | None = None, fail: str = "", lag: bool = False) -> StepPlan | None:
        """One engine step; None where there is nothing to do, or only an older step to resolve.

        lag: the plan stays in flight, and is resolved after the plan of the next call. abort_in_flight: a request id to abort
        between the plan and what is resolved. fail: "dispatch" (this step raises) or "read" (the older one does, or this one).
        """
        before = {r.request_id: (r.row, r.num_computed) for r in self._alive()}
        available = {r.request_id: self.slots.available(r.adapter) for r in self._alive() if self.slots and r.adapter}
        self.looks, self.not_ready = self.looks + 1, set()
        plan = self.scheduler.plan()
        for _, adapter in plan.slot_writes if plan else ():
            self.asked.pop(adapter)
            waited = adapter not in self.not_ready or not self.in_flight
            assert waited, f"{adapter} is waited for while steps run"
        self.check()
        if plan is not None:
            self.plans.append(plan)
            self._check_plan(plan)
            self._check_order(before, available)
            self._check_progress(before)
            if fail != "dispatch":
                self.in_flight.append((plan, self.device.run(plan)))
        if abort_in_flight is not None:
            self.scheduler.abort(abort_in_flight)
            self.check()
        keep = 1 if lag and plan is not None and not fail else 0
        while len(self.in_flight) > keep and fail != "read":
            self._resolve(*self.in_flight.pop(0))
        if fail:
            self._lose_everything()
        self.check()
        return plan

    def _resolve(self, plan: StepPlan, sampled: dict[str, int]) -> None:
        for request in self.scheduler.resolve(plan, sampled):
            reason = end_of(request.output_token_ids, request.max_tokens, self.rates.stop)
            if reason is not None:
                self.scheduler.finish(request, reason)
            self.check(integrity=len(plan.rows) < 8)

    def _lose_everything(self) -> None:
        self.in_flight.clear()
        self.scheduler.reset_running()
        self.device.lose_everything()
        if self.slots:
            self.slots.held = [None] * len(self.slots.held)
        self.stalled = ("", 0)

    def run(self, max_steps: int, *, lag: bool = False) -> None:
        """Until all have ended and nothing is in flight."""
        for _ in range(max_steps):
            if self.try_step(lag=lag) is None and not self.scheduler.has_unfinished() and not self.in_flight:
                return
        raise AssertionError(f"{self.scheduler.stats()} after {max_steps} steps")

    def check_results(self) -> None:
        """All ended, each with the tokens of its solo run (aborted ones: a prefix of them), and nothing is held."""
        for request in self.requests:
            want = solo(request, self.rates)
            got = request.output_token_ids
            if request.finish_reason == "abort" and got[-1:] != [-1]:
                want = want[: len(got)]
            else:
                assert request.finish_reason == end_of(want, request.max_tokens, self.rates.stop), request
            assert request.pending == 0 and got == want, f"{request.request_id}: {got} != {want}"
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, self.cache.num_pages - 1), stats
        assert not self.slots or not +self.slots.pins, self.slots and self.slots.pins

    def step_bound(self) -> int:
        """Far more steps than any fair schedule needs: each request done again for each older one, alternating."""
        chunk = self.config.max_num_batched_tokens
        work = sum(-(-(len(r.prompt_token_ids) + r.max_tokens) // chunk) + r.max_tokens for r in self.requests)
        return 10 + 2 * work * (1 + len(self.requests))

    def check(self, *, integrity: bool = True) -> None:
        """integrity: False where it would cost too much."""
        if not integrity:
            return
        self.scheduler.check_integrity()
        if self.slots:
            held = Counter(r.adapter for r in self._alive() if r.adapter and r.row >= 0)
            assert +self.slots.pins == held, f"pinned {self.slots.pins}, running {held}"
            for r in self._alive():
                assert r.slot < 0 or self.slots.held[r.slot] == r.adapter, f"{r.request_id}: slot {r.slot}"

    # -- what each plan must be, seen from outside --

    def _alive(self) -> list[Request]:
        return [r for r in self.requests if r.finish_reason is None]

    def _check_plan(self, plan: StepPlan) -> None:
        rows, size = plan.rows, self.cache.page_size
        tokens = sum(row.num_tokens for row in rows)
        assert rows and len({id(row.request) for row in rows}) == len(rows)
        assert len({row.request.row for row in rows}) == len(rows), "two requests on a row"
        assert plan.key.phase == plan.phase and plan.key.mode == ""
        assert plan.key.lora == any(row.request.adapter for row in rows)
        for row in rows:
            end = row.start + row.num_tokens
            total = len(row.request.token_ids) + row.request.pending - row.samples  # when the step was planned
            assert row.num_tokens >= 1 and end == row.request.num_computed
            assert row.samples == (end == total) and row.index == total - len(row.request.prompt_token_ids)
            assert row.index < row.request.max_tokens, "a token that the request may not have"
            assert len(row.request.pages) * size >= end and 0 not in row.request.pages
            assert 0 <= row.request.row < self.config.max_num_seqs
        if plan.phase == "decode":
            assert all(row.num_tokens == 1 and row.samples for row in rows) and not plan.slot_writes
            assert plan.key.bucket in self.config.row_buckets and len(rows) <= plan.key.bucket
            slots = [row.request.slot for row in rows]
            assert slots == sorted(slots), "rows of an adapter that do not lie side by side"
        else:
            assert tokens <= self.config.max_num_batched_tokens and len(rows) <= self.config.max_prefill_seqs
            assert plan.key.bucket in self.config.token_buckets and tokens <= plan.key.bucket
            assert all(row.samples for row in rows[:-1])
            assert sum(len(row.request.pages) for row in rows) <= self.cache.most_listed(self.config)
        if len(self.plans) > 1 and plan.phase == self.plans[-2].phase == "prefill":
            planned = {id(row.request) for row in rows}
            ready = [r for r in self._alive() if r.row >= 0 and id(r) not in planned and not awaits_end(r)]
            assert not ready, f"a second prefill step in a row while {ready[0].request_id} is ready to decode"

    def _check_order(self, before: dict[str, tuple[int, int]], available: dict[str, bool]) -> None:
        """Nobody passes an older waiting request, unless that one lacks a slot; by adapters only so often."""
        for request in self._alive():
            if before[request.request_id][0] >= 0 and request.row < 0:
                self.preempted[request.request_id] += 1
        waited = [r for r in self._alive() if before[r.request_id][0] < 0]
        admitted = [r for r in waited if r.row >= 0]
        self.admissions += [r.request_id for r in admitted]
        left = [(i, r) for i, r in enumerate(waited) if r.row < 0]
        for i, old in left:
            passing = [r for r in waited[i + 1 :] if r.row >= 0]
            if old.adapter in self.not_ready:
                continue
            if old is left[0][1]:
                self._check_passes(old, [r.adapter for r in passing if r.adapter])
            assert not passing or (old.adapter and self.slots), f"{old.request_id} is passed by {passing[0].request_id}"
            taken = any(r.row >= 0 and r.adapter for r in waited[:i])
            had_slot = available.get(old.request_id) and not taken and self.passes < self.config.max_num_seqs
            assert not (passing and had_slot), f"{old.request_id} is passed although a slot was there"

    def _check_passes(self, head: Request, passing: list[FakeAdapter]) -> None:
        """After max_num_seqs passes, at least one of the adapters that hold slots must not pass any more."""
        if head is not self.head:
            self.head, self.passes, self.may_drain = head, 0, None
        for adapter in passing:
            if self.passes == self.config.max_num_seqs:
                if self.may_drain is None:
                    self.may_drain = {r.adapter for r in self._alive() if r.row >= 0 and r.adapter}
                self.may_drain.discard(adapter)
                assert self.may_drain, f"{head.request_id} is passed for ever: no adapter drains for it"
            else:
                self.passes += 1

    def _check_progress(self, before: dict[str, tuple[int, int]]) -> None:
        """The oldest running request is never preempted, and advances at least in every second step."""
        oldest = next((r for r in self.requests if before.get(r.request_id, (-1, 0))[0] >= 0), None)
        if oldest is None or oldest.finish_reason is not None:
            self.stalled = ("", 0)
            return
        assert oldest.row == before[oldest.request_id][0], f"{oldest.request_id}, the oldest, lost its row"
        name = oldest.request_id
        advanced = oldest.num_computed > before[name][1] or awaits_end(oldest)
        self.stalled = (name, 0 if advanced else 1 + (self.stalled[1] if self.stalled[0] == name else 0))
        assert self.stalled[1] < 2, f"{name} is stuck at {oldest.num_computed}"
