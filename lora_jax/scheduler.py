"""Continuous batching: which requests run in the next step, on which pages, rows and adapter slots.

Host only: never imports jax. One thread uses a `Scheduler`.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .config import CacheConfig, SchedulerConfig
from .draining import Draining
from .kv_pages import KVPages
from .plan import ScheduledRow, SchedulerStats, SlotSource, StepPlan
from .request import FinishReason, Request
from .step_keys import StepKey, bucket_for


class Scheduler:
    """Decides step by step; the engine's loop is

        plan = scheduler.plan()                       # None: nothing to do before the plan in flight is resolved
        tokens = run(plan)                            # {request_id: token} of the rows with samples=True
        for request in scheduler.resolve(plan, tokens):  # those that got a token, which is appended already
            if done(request): scheduler.finish(request, reason)

    One plan may be made while an earlier one is unresolved. Making it counts its work as done: num_computed advances, and a
    row that samples has one more pending token, whose number is known and whose value is not. Positions, pages, indices and
    limits count pending tokens, so a request that has all it may get is not planned again.
    A request may be aborted or finished while plans hold it; `resolve` then drops its rows. What it held may be given away
    at once: the device runs steps in the order of their plans, so whatever a younger plan still writes for it comes before
    what the next owner of its pages, row or slot writes, and the next owner reads nothing that it has not written.
    A step that raised is never resolved: `reset_running()` and go on.

    Prefix caching. A request that enters begins with the tokens of pages that are there already (see `KVPages`).

    Order. Requests are admitted as they came. A request enters when a row, the pages of all its tokens (plus one page
    for each running request, so that it isn't thrown out at once) and its adapter's slot are there. A request that
    lacks only a slot may be passed by later ones that need none or whose adapter has one. So that it doesn't wait for
    ever, one adapter drains for the oldest such request once max_num_seqs requests with adapters have passed (`Draining`): its
    slot is free when its requests have ended, however many others come. While an adapter is made ready for a slot that
    it could get, others pass as well. Prefill and decode steps alternate while there is work for both.

    Preemption. When pages run out, the running request that came last gives everything back, keeps its tokens, and
    waits in order of arrival; all its tokens are computed again later. So the oldest running request is never
    preempted, and it advances at least in every second step. One with a pending token is not admitted before that is known.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        slots: SlotSource | None = None,
        choose_items: Callable[[int, set[Any]], int] | None = None,
        is_ready: Callable[[Any], bool] = lambda adapter: True,
    ):
        """slots: None where no adapters are served. choose_items: StepKey.items of a decode step of so many rows, from its
        adapters; None: 0. is_ready: whether an adapter's slot can be written at once, rather than soon."""
        self.config = config
        self.cache = cache
        self.max_pages_per_seq = cache.pages_for(config.max_model_len)
        self.preemptions = 0
        self._max_prefill_seqs, self._most_listed = config.max_prefill_seqs, cache.most_listed(config)
        self._buckets = {"prefill": config.token_buckets, "decode": config.row_buckets}
        self._slots, self._choose_items, self._is_ready = slots, choose_items, is_ready
        self._pages = KVPages(cache, prefix_caching=config.enable_prefix_caching)
        self._requests: dict[str, Request] = {}
        self._order: dict[Request, int] = {}  # position in order of arrival
        self._next_order = 0
        self._waiting: list[Request] = []  # both lists in order of arrival
        self._running: list[Request] = []
        self._partial: Request | None = None  # the running request whose prefill isn't through yet
        self._draining = Draining(config.max_num_seqs)
        self._free_rows = list(range(config.max_num_seqs))  # a heap
        self._unresolved: deque[StepPlan] = deque()  # oldest first
        self._last_phase = "decode"
        self._blocked = False  # the last look at the queue admitted nobody, and nothing was released or added since

    # -- requests come and go --

    def never_fits(self, num_tokens: int) -> str | None:
        """Why a request of num_tokens (prompt plus the most it may generate) could never run; None: it can."""
        if num_tokens > self.config.max_model_len:
            limit = self.config.max_model_len
            return f"{num_tokens} tokens exceed max_model_len={limit}; shorten the prompt or max_tokens"
        return self._pages.never_fits(num_tokens)

    def add(self, request: Request) -> None:
        """Queues a request. Its id must be new, it must not be one that `never_fits`."""
        name = request.request_id
        assert name not in self._requests, f"request id {name!r} is in use"
        assert request.token_ids, f"request {name!r} has no tokens"
        assert request.adapter is None or self._slots is not None, f"request {name!r} has an adapter, LoRA is off"
        refusal = self.never_fits(len(request.token_ids) + 1)
        assert refusal is None, f"request {name!r}: {refusal}"
        try:
            self._requests[name] = request
            self._order[request] = self._next_order
            self._next_order += 1
            self._waiting.append(request)
            self._blocked = False
        except BaseException:  # an interrupt, after which it is there as a whole or not at all
            self._waiting[:] = [other for other in self._waiting if other is not request]
            self._order.pop(request, None)
            self._requests.pop(name, None)
            raise

    def finish(self, request: Request, reason: FinishReason, *, broken: bool = False) -> None:
        """Ends a request, running or waiting, and takes back all it holds. broken: what lies in its pages is not for others."""
        assert self._requests.get(request.request_id) is request, f"request {request.request_id!r} is not scheduled"
        if request.row >= 0:
            self._release(request, broken=broken)
        else:
            del self._waiting[self._index(self._waiting, request)]
            self._blocked = False
        del self._requests[request.request_id], self._order[request]
        request.finish_reason, request.pending = reason, 0
        self._draining.ends(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request with reason "abort". None: no such request, for instance because it has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def reset_running(self) -> list[Request]:
        """After a step that lost the device's cache: drops all plans in flight, queues all running requests again."""
        self._unresolved.clear()
        self._blocked = False
        for request in self._requests.values():
            request.pending = 0
        requests = list(self._running)
        for request in requests:
            self._requeue(request)
        self._pages.forget()
        return requests

    def forget_prefixes(self) -> None:
        """Nobody shares what has been computed so far."""
        self._pages.forget()

    def unfinished(self) -> list[Request]:
        """In order of arrival."""
        return list(self._requests.values())

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._running), len(self._waiting), self.preemptions, *self._pages.stats())

    # -- one step --

    def plan(self) -> StepPlan | None:
        """The next step, with rows, pages and slots assigned. None: nothing can run before the plan in flight is resolved, or
        no request is unfinished."""
        assert len(self._unresolved) < 2, "plan() with two plans in flight: resolve() the older one first"
        if not self._requests:
            return None
        if self._last_phase == "prefill":
            plan = self._plan_decode() or self._plan_prefill()
        else:
            plan = self._plan_prefill() or self._plan_decode()
        if plan is None and not self._unresolved:
            plan = self._plan_prefill(wait=True)
        if plan is None:
            assert self._unresolved, f"no progress is possible: {self.stats()}, head {self._waiting[:1]}"
            return None
        for request, _, num_tokens, samples, _ in plan.rows:
            request.num_computed += num_tokens
            request.pending += samples
            if not samples:
                self._partial = request
            elif request is self._partial:
                self._partial = None
        self._unresolved.append(plan)
        self._last_phase = plan.phase
        return plan

    def resolve(self, plan: StepPlan, sampled: Mapping[str, int]) -> list[Request]:
        """Appends the tokens of the oldest plan in flight.

        sampled: request id -> token, for every row with samples=True. Rows of requests that ended meanwhile are
        dropped, with or without a token. Returns the requests that got a token, in row order.
        """
        assert self._unresolved and plan is self._unresolved[0], "resolve() of a plan that is not the oldest in flight"
        got = [row.request for row in plan.rows if row.samples and self._is_open(row.request)]
        for request in got:
            assert request.request_id in sampled, f"no sampled token for request {request.request_id!r}"
            request.token_ids.append(sampled[request.request_id])
            request.pending -= 1
            if request.row < 0:  # preempted meanwhile; now it may be admitted
                self._blocked = False
        self._unresolved.popleft()
        return got

    def _is_open(self, request: Request) -> bool:
        """Whether it is this very request, and not another of the same id, that is scheduled."""
        return self._requests.get(request.request_id) is request

    def _plan_decode(self) -> StepPlan | None:
        rows: list[ScheduledRow] = []
        size, longest = self.cache.page_size, self.config.max_model_len
        for request in list(self._running):
            if request.row < 0 or request is self._partial:  # row < 0: preempted for an earlier one just now
                continue
            start, index = request.num_computed, request.num_sampled
            if request.pending and (index >= request.max_tokens or start + 1 >= longest):
                continue  # it has all that it may get, once that is known
            if start < len(request.pages) * size or self._grow(request, start + 1, may_leave=True):
                rows.append(ScheduledRow(request, start, 1, True, index))
        if not rows:
            return None
        key = self._key("decode", len(rows), rows)
        if key.lora:  # rows of an adapter side by side: a tile of many rows then has few adapters to go through
            rows.sort(key=lambda row: row.request.slot)
        return StepPlan("decode", rows, key)

    def _plan_prefill(self, *, wait: bool = False) -> StepPlan | None:
        """wait: nothing else can run, so requests may come whose adapters are not ready: they begin together."""
        rows: list[ScheduledRow] = []
        writes: list[tuple[int, Any]] = []
        begun: list[Request] = []
        budget = self.config.max_num_batched_tokens
        if self._partial is not None:
            row = self._chunk(self._partial, budget)
            if not self._grow(self._partial, row.start + row.num_tokens, may_leave=False):
                return None  # older requests hold the pages: they decode until some are free
            self._pages.offer(self._partial, row.start + row.num_tokens)
            rows.append(row)
            budget -= row.num_tokens
        self._admit(rows, writes, begun, budget, wait)
        if not rows:
            return None
        tokens = sum(row.num_tokens for row in rows)
        assert all(row.samples for row in rows[:-1]), [row.samples for row in rows]
        assert sum(len(row.request.pages) for row in rows) <= self._most_listed, f"{len(rows)} rows hold too many pages"
        return StepPlan("prefill", rows, self._key("prefill", tokens, rows), writes, begun)

    def _admit(
        self, rows: list[ScheduledRow], writes: list[tuple[int, Any]], begun: list[Request], budget: int, wait: bool
    ) -> None:
        """Appends waiting requests to a prefill plan, as far as they fit."""
        if self._blocked:
            return
        full, listed = False, sum(len(row.request.pages) for row in rows)
        lacking = fetching = False
        refused: set[int] = set()  # ids of adapters: a long queue asks once for each
        for request in list(self._waiting):
            full = not budget or len(rows) == self._max_prefill_seqs
            if full or request.pending or not self._free_rows:
                break
            adapter, slots = request.adapter, self._slots
            if adapter is not None and slots is not None:
                barred = lacking and self._draining.bars(adapter, slots, self._running)
                if barred or id(adapter) in refused:
                    refused.add(id(adapter))
                    continue
            found = self._pages.find(request)
            more = len(found) + self.cache.pages_for(min(budget, len(request.token_ids)))
            full = bool(rows) and listed + more > self._most_listed
            if full or not self._pages.fits(request, found, len(self._running)):
                break
            if adapter is not None and slots is not None:
                if slots.available(adapter) and not self._is_ready(adapter) and not wait:
                    refused.add(id(adapter))
                    fetching = True
                    continue
                if not self._acquire_slot(request, writes):
                    refused.add(id(adapter))
                    if not lacking:
                        self._draining.lacks(request)
                    lacking = True
                    continue
                if lacking:
                    self._draining.passed()
            self._draining.ends(request)
            row = self._start(request, found, budget)
            rows.append(row)
            begun.append(request)
            budget, listed = budget - row.num_tokens, listed + len(request.pages)
        self._blocked = not begun and not full and not fetching

    # -- resources of one request --

    def _acquire_slot(self, request: Request, writes: list[tuple[int, Any]]) -> bool:
        assert self._slots is not None
        acquired = self._slots.acquire(request.adapter)
        if acquired is None:
            return False
        request.slot, must_write = acquired
        if must_write:
            writes.append((request.slot, request.adapter))
        return True

    def _start(self, request: Request, found: list[int], budget: int) -> ScheduledRow:
        """Moves a waiting request to a row, to the pages found and to those of its first tokens after them; that they are free is
        known."""
        del self._waiting[self._index(self._waiting, request)]
        request.row = heapq.heappop(self._free_rows)
        self._pages.begin(request, found)
        row = self._chunk(request, budget)
        self._pages.extend(request, row.start + row.num_tokens)
        self._pages.offer(request, row.start + row.num_tokens)
        bisect.insort(self._running, request, key=self._order.__getitem__)
        return row

    def _grow(self, request: Request, num_tokens: int, *, may_leave: bool) -> bool:
        """Makes a running request's pages cover num_tokens, preempting later ones if need be.

        False: the pages are held by earlier requests; it has been preempted itself if it may_leave.
        """
        assert num_tokens < self.config.max_model_len, f"{request.request_id!r} leaves no room to sample: {num_tokens}"
        while self._pages.missing(request, num_tokens) > self._pages.num_free:
            victim = self._running[-1]
            if victim is request and not may_leave:
                return False
            self.preemptions += 1
            self._requeue(victim)
            if victim is request:
                return False
        self._pages.extend(request, num_tokens)
        return True

    def _requeue(self, request: Request) -> None:
        self._release(request)
        bisect.insort(self._waiting, request, key=self._order.__getitem__)

    def _release(self, request: Request, *, broken: bool = False) -> None:
        """Takes back all that a running request holds."""
        del self._running[self._index(self._running, request)]
        self._pages.release(request, broken=broken)
        heapq.heappush(self._free_rows, request.row)
        if request.adapter is not None and self._slots is not None:
            self._slots.release(request.adapter)
        request.row, request.slot = -1, -1
        if request is self._partial:
            self._partial = None
        self._blocked = False

    # -- small helpers --

    def _index(self, queue: list[Request], request: Request) -> int:
        i = bisect.bisect_left(queue, self._order[request], key=self._order.__getitem__)
        assert i < len(queue) and queue[i] is request, f"request {request.request_id!r} is not queued where expected"
        return i

    def _chunk(self, request: Request, budget: int) -> ScheduledRow:
        start, end = request.num_computed, len(request.token_ids)
        n = min(budget, end - start)
        return ScheduledRow(request, start, n, start + n == end, request.num_sampled)

    def _key(self, phase: Literal["prefill", "decode"], n: int, rows: list[ScheduledRow]) -> StepKey:
        adapters = {row.request.adapter for row in rows} - {None}
        lora, bucket = not self.config.specialize_lora or bool(adapters), bucket_for(n, self._buckets[phase])
        choose = self._choose_items if lora and phase == "decode" else None
        return StepKey(phase, bucket, lora, items=0 if choose is None else choose(bucket, adapters))

    def check_integrity(self) -> None:
        """Asserts that nothing is lost, shared or out of order. O(pages + requests): for tests and idle moments."""
        running, waiting = self._running, self._waiting
        self._pages.check_integrity(running)
        assert sorted([*self._free_rows, *(r.row for r in running)]) == list(range(self.config.max_num_seqs)), (
            f"rows free {sorted(self._free_rows)}, in use {[r.row for r in running]}"
        )
        for queue in (running, waiting):
            order = [self._order[r] for r in queue]
            assert order == sorted(set(order)), f"not in order of arrival: {order}"
        assert {*running, *waiting} == set(self._requests.values()) == self._order.keys(), "a request is lost"
        assert len(running) + len(waiting) == len(self._requests), "a request is both running and waiting"
        assert self._partial is None or self._partial in running, "the partial request does not run"
        for r in waiting:
            held = (r.pages, r.row, r.slot, r.num_computed)
            assert held == ([], -1, -1, 0), f"waiting request {r.request_id!r} holds {held}"
        pending = Counter(row.request for plan in self._unresolved for row in plan.rows if row.samples)
        wrong = {r.request_id: r.pending for r in self._requests.values() if r.pending != pending[r]}
        assert not wrong, f"pending tokens that no plan in flight gives, or the other way round: {wrong}"
        slots: dict[int, Any] = {}
        for r in running:
            self._check_running(r)
            assert r.slot < 0 or slots.setdefault(r.slot, r.adapter) is r.adapter, f"slot {r.slot} has two adapters"
        assert len({id(adapter) for adapter in slots.values()}) == len(slots), f"an adapter has two slots: {slots}"

    def _check_running(self, request: Request) -> None:
        name, computed, total = request.request_id, request.num_computed, len(request.token_ids) + request.pending
        covered = len(request.pages) * self.cache.page_size
        assert computed <= min(total, covered), f"{name}: {computed} computed, {total} tokens, pages for {covered}"
        assert len(request.pages) <= self.max_pages_per_seq, f"{name}: {len(request.pages)} pages"
        assert (request.slot >= 0) == (request.adapter is not None), f"{name}: slot {request.slot}"
        if request is not self._partial:
            assert computed == total - 1, f"{name} decodes with {computed} of {total} tokens computed"
