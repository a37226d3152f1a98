"""The engine: requests in, step outputs out. One thread calls `step`; every other method may be called from any thread."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from functools import partial
from typing import Any

from .adapter_loader import AdapterLoader
from .builder import Built, build, read_for
from .config import EngineArgs
from .dispatch import compilations
from .errors import EngineDeadError, LoraJaxError, RequestError
from .inputs import check_params, prompt_ids
from .log import log, show_log
from .lora.adapter import Adapter, LoadReport
from .outputs import OutputState, failed, not_finite
from .plan import StepPlan
from .request import LoRARequest, Prompt, Request, SamplingParams, StepOutput
from .runtime import InFlight, StepResult
from .sampling_inputs import banned_ids
from .scheduler import Scheduler

MAX_FAILED_STEPS = 3  # in a row; then the fault is not one request's


class Engine:
    """Continuous batching over one model and its adapters.

    weights: another engine of this process, for the same model, dtype and device, whose base weights this one uses too.
    Raises at start: ConfigError, ModelLoadError, CapacityError, AdapterError, each saying what to change.
    """

    def __init__(self, args: EngineArgs, *, weights: Engine | None = None):
        show_log()
        built: Built = build(args, None if weights is None else weights._built)
        self.args = args
        self.model_name = args.model
        self.tokenizer = built.tokenizer
        self.defaults = built.defaults
        self.memory_plan = built.memory
        self.max_logprobs = args.max_logprobs
        self._built = built
        self._runtime = built.runtime
        self.step_table = built.runtime.table
        spec = built.runtime.spec
        self.model_config, self.dtype, self.device = spec.model, spec.dtype, spec.setup.device
        self.scheduler_config = spec.builder.scheduler  # with every size settled
        self.max_model_len = self.scheduler_config.max_model_len
        self._slots = spec.lora.slot_manager() if spec.lora else None
        self._scheduler = self._new_scheduler()
        self._in_flight: InFlight | None = None  # dispatched and not read yet
        self._lock = threading.RLock()
        self._outputs: dict[str, OutputState] = {}
        self._aborts: deque[Request] = deque()
        self._loras = AdapterLoader(self._slots, partial(read_for, spec, built.base_tensor))
        self._ids = itertools.count()
        self._counts = dict(steps=0, prompt_tokens=0, generation_tokens=0, slot_writes=0, failed_steps=0)
        self._failed_in_a_row = 0
        # What an interrupt or a fault left half done, in `add_request` or in `step`: the next step starts over. Set before and
        # cleared after, not in a handler, which a second interrupt would cut short.
        self._torn = self._stale = False
        self._undelivered: list[StepOutput] = []
        self._dead: Exception | None = None
        for adapter in built.adapters:
            assert self._slots is not None
            self._slots.register(adapter)
        self._compiled_at_start = compilations()

    def _new_scheduler(self) -> Scheduler:
        spec = self._runtime.spec
        choose = None if spec.item_buckets is None else spec.item_buckets.choose
        return Scheduler(spec.builder.scheduler, spec.builder.cache, self._slots, choose, self._is_ready)

    def _is_ready(self, adapter: Adapter) -> bool:
        """Whether it lies in a slot or can be written to one without waiting for the host."""
        assert self._slots is not None
        return self._slots.slot_of(adapter) is not None or self._runtime.stage(adapter)

    # -- requests --

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Check and tokenize. Loads the adapter first if it is not loaded and `lora_request` has a path.

        Raises: RequestError naming the field, AdapterNotFoundError, AdapterError.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}", param="request_id")
        vocab = self._runtime.spec.model.vocab_size
        ids = prompt_ids(prompt, self.tokenizer, self.max_model_len, vocab)
        check_params(params, self.tokenizer, self.max_logprobs, vocab)
        room = self.max_model_len - len(ids)
        adapter = self._loras.adapter_of(lora_request)
        request = Request(
            request_id=request_id or f"request-{next(self._ids)}",
            prompt_token_ids=ids,
            params=params,
            adapter=adapter,
            prompt=prompt if isinstance(prompt, str) else None,
            lora_request=lora_request,
            eos_token_ids=self.defaults.eos_token_ids,
            max_tokens=min(params.max_tokens or room, room),
        )
        banned_ids(params, request.eos_token_ids)  # refuses what min_tokens cannot hold back
        with self._lock:
            never = self._scheduler.never_fits(len(ids) + request.max_tokens)
        if never is not None:
            raise RequestError(never, param="max_tokens")
        return request

    def add_request(self, request: Request) -> None:
        """Queue a request made by `make_request`. Raises EngineDeadError after the engine has died."""
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(f"the engine has stopped: {self._dead}")
            if request.request_id in self._outputs:
                raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
            if request.params.n > 1:
                raise RequestError("n > 1: add each of request.continuations(request)", param="n")
            if request.finish_reason is not None:
                raise RequestError(
                    f"request {request.request_id!r} has ended: make a new one with make_request", param="request_id"
                )
            self._torn = True
            try:
                self._outputs[request.request_id] = OutputState.of(request, self.tokenizer)
                self._scheduler.add(request)
            except BaseException:  # an interrupt
                self._outputs.pop(request.request_id, None)
                raise
            self._torn = False

    def abort(self, request_id: str) -> None:
        """End a request before the next step; an unknown or finished one is ignored."""
        with self._lock:
            state = self._outputs.get(request_id)
            if state is not None:  # the request, not its id, which may be given again
                self._aborts.append(state.request)

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do that somebody waits for."""
        with self._lock:
            left_over = bool(self._outputs) and (self._stale or self._torn)
            return left_over or bool(self._undelivered) or self._scheduler.has_unfinished()

    def drain(self) -> None:
        """Read a step that was begun ahead for requests that had ended, if there is one: it keeps them and their adapters.
        For whoever calls `step`, when nothing is unfinished."""
        if self._in_flight is not None and self._dead is None and not self.has_unfinished():
            self._undelivered = self.step()

    # -- the loop --

    def step(self) -> list[StepOutput]:
        """Plan and dispatch one step, then read the one dispatched by the call before and return what each request got in it,
        in no particular order. So the device has the next step before anybody looks at the tokens of this one, and a first
        call returns nothing. With nothing to plan it only reads.

        A step that fails on the device fails its own requests; all others are computed again. Raises EngineDeadError when it
        keeps failing. After an interrupt, or a fault outside the device that this call raises, the next call computes every
        request again and returns what this one did not.
        """
        if self._dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self._dead}")
        if self._stale or self._torn:
            self._start_over()
        self._stale = True
        self._step()
        self._stale = False
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _step(self) -> None:
        with self._lock:
            self._take_aborts()
            plan = self._scheduler.plan()
        older, younger, error = self._in_flight, None, None
        if plan is not None:
            try:
                for slot, adapter in plan.slot_writes:
                    assert self._slots is not None
                    self._runtime.write_slot(slot, self._slots.places_of(adapter), adapter)
                    self._counts["slot_writes"] += 1
                younger = self._runtime.dispatch(plan)
            except Exception as e:  # the older step may be whole: its tokens come first
                error = e
        if older is not None:
            try:
                result = self._runtime.read(older)
            except Exception as e:  # the younger step, if there is one, started from what this one lost
                return self._recover(older.plan, e)
            self._failed_in_a_row = 0
            with self._lock:
                self._resolve(older.plan, result)
        if error is not None:
            assert plan is not None
            return self._recover(plan, error)
        self._in_flight = younger

    def _take_aborts(self) -> None:
        while self._aborts:
            request = self._aborts.popleft()
            if self._state_of(request) is not None:
                self._scheduler.abort(request.request_id)
                self._end(StepOutput(request.request_id, finish_reason="abort"))

    def _end(self, output: StepOutput) -> None:
        """The last output of a request."""
        self._undelivered.append(output)
        del self._outputs[output.request_id]

    def _state_of(self, request: Request) -> OutputState | None:
        """None: it has ended, also when another one has its id now."""
        state = self._outputs.get(request.request_id)
        return state if state is not None and state.request is request else None

    def _resolve(self, plan: StepPlan, result: StepResult) -> None:
        self._counts["steps"] += 1
        if plan.phase == "prefill":
            self._counts["prompt_tokens"] += sum(row.num_tokens for row in plan.rows)
        for request, position, logprobs in result.prompt_logprobs:
            state = self._state_of(request)
            if state is not None:
                state.add_prompt_logprobs(position, logprobs)
        tokens = 0
        for request in self._scheduler.resolve(plan, result.tokens):
            token = request.token_ids[-1]
            if token < 0:
                self._scheduler.finish(request, "abort", broken=True)
                self._end(failed(request.request_id, not_finite(request)))
                continue
            tokens += 1
            out = self._outputs[request.request_id].advance(token, result.logprobs.get(request.request_id))
            if out.finish_reason is None:
                self._undelivered.append(out)
                continue
            request.stop_reason = out.stop_reason
            self._scheduler.finish(request, out.finish_reason)
            self._end(out)
        self._counts["generation_tokens"] += tokens

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        log.error("step %s failed; its requests fail, the others are computed again", plan.key, exc_info=error)
        self._in_flight = None
        self._counts["failed_steps"] += 1
        self._failed_in_a_row += 1
        with self._lock:
            self._forget_device_state()
            for row in plan.rows:
                if self._state_of(row.request) is None:
                    continue
                self._scheduler.finish(row.request, "abort")
                cause = LoraJaxError(f"the step that computed this request failed: {type(error).__name__}: {error}")
                self._end(failed(row.request.request_id, cause))
            if self._failed_in_a_row >= MAX_FAILED_STEPS:
                self._dead = error
                raise EngineDeadError(f"{MAX_FAILED_STEPS} steps in a row failed, last: {error}") from error
        self._new_device_state()

    def _new_device_state(self) -> None:
        try:
            self._runtime.recover()
        except Exception as again:
            self._dead = again
            raise EngineDeadError(f"the device state could not be made anew: {again}") from again

    def _start_over(self) -> None:
        """After an interrupt, which may have come anywhere in the bookkeeping, this method included: a new scheduler for the
        same requests, and new device state."""
        with self._lock:
            self._in_flight = None
            old, self._scheduler = self._scheduler, self._new_scheduler()
            self._scheduler.preemptions = old.preemptions
            if self._slots is not None:
                self._slots.forget_slots(even_held=True)
            told = {output.request_id for output in self._undelivered if output.finish_reason is not None}
            for request_id, state in list(self._outputs.items()):
                request = state.request
                del request.token_ids[len(request.prompt_token_ids) + state.given :]  # what no output tells of
                request.pages, request.row, request.slot, request.num_computed, request.pending = [], -1, -1, 0, 0
                request.page_digests.clear()
                if request_id in told:
                    del self._outputs[request_id]
                elif request.finish_reason is None and request.num_output < request.max_tokens:
                    self._scheduler.add(request)
                else:  # its end was counted and never told
                    self._end(failed(request_id, LoraJaxError("the request's last output was lost in an interrupt")))
            self._torn = False
        self._new_device_state()
        self._stale = False

    def _forget_device_state(self) -> None:
        self._scheduler.reset_running()
        if self._slots is not None:
            self._slots.forget_slots()

    # -- adapters --

    def load_lora(self, name: str, path: str, *, replace: bool = False) -> LoadReport:
        """Read, check and keep an adapter in host memory; the device slot is written when a request first needs it.

        replace: take the place of an adapter of that name; requests in flight finish with the old weights.
        Raises: AdapterError, AdapterCapacityError; nothing has changed then.
        """
        return self._loras.load(name, path, replace=replace)

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests in flight finish with it. Raises AdapterNotFoundError."""
        with self._lock:
            self._loras.slots_for(name).unregister(name)

    def pin_lora(self, name: str) -> None:
        """Keep the device slot of a loaded adapter, from its next use on, however many others are wanted; at least one slot
        stays free for those. Raises: AdapterNotFoundError, AdapterCapacityError."""
        self._loras.slots_for(name).pin(name)

    def unpin_lora(self, name: str) -> None:
        """End `pin_lora`; nothing happens to an adapter that is not pinned. Raises AdapterNotFoundError."""
        self._loras.slots_for(name).unpin(name)

    def list_loras(self) -> list[LoadReport]:
        """Reports of the loaded adapters."""
        return [a.report for a in self._slots.adapters()] if self._slots else []

    # -- what it is doing --

    def reset_prefix_cache(self) -> None:
        """Requests that begin from now on share nothing with those before; running ones are left alone."""
        with self._lock:
            self._scheduler.forget_prefixes()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and the state of queues, pages and slots now."""
        with self._lock:
            s = self._scheduler.stats()
            return dict(
                running=s.running,
                waiting=s.waiting,
                free_pages=s.free_pages,
                num_pages=self._scheduler.cache.num_pages,
                cached_pages=s.cached_pages,
                preemptions=s.preemptions,
                prefix_cache_queries=s.prefix_cache_queries,
                prefix_cache_hits=s.prefix_cache_hits,
                **self._counts,
                loras=[a.name for a in self._slots.adapters()] if self._slots else [],
                compilations_after_warmup=compilations() - self._compiled_at_start,
                tuned_tiles=len(self._runtime.spec.tiles.entries),
            )

    def check_integrity(self) -> None:
        """Assert that no page, row or slot is lost or shared wrongly. For tests and idle moments."""
        with self._lock:
            self._scheduler.check_integrity()
            if self._slots is not None:
                self._slots.check_integrity()
