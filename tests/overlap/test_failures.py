"""What goes wrong with a step in flight: on the device, in the bookkeeping, by interrupts."""

from __future__ import annotations

import gc
import weakref

import jax
import pytest

from lora_jax import LLM
from lora_jax.errors import EngineDeadError
from lora_jax.request import Request, StepOutput
from tests.support.overlap import add, drain, expected, given, tokens


def drain_despite(kind: type[BaseException], llm: LLM) -> tuple[dict[str, list[StepOutput]], int]:
    """Outputs of each request until all have ended, and how often `step` raised."""
    outputs: dict[str, list[StepOutput]] = {}
    raised = 0
    while llm.engine.has_unfinished():
        try:
            for out in llm.engine.step():
                outputs.setdefault(out.request_id, []).append(out)
        except kind:
            raised += 1
    return outputs, raised


class Broken:
    """Raises once, at the nth call of a method of the runtime that has this request in its step."""

    def __init__(self, llm: LLM, monkeypatch, method: str, request: Request, nth: int, error: BaseException):
        self.runtime, self.call = llm.engine._runtime, getattr(llm.engine._runtime, method)
        self.request, self.left, self.error, self.lost = request, nth, error, set()
        monkeypatch.setattr(self.runtime, method, self)

    def __call__(self, step):
        requests = [row.request for row in getattr(step, "plan", step).rows]
        self.left -= self.request in requests
        if self.left == 0 and not self.lost:
            self.lost = {r.request_id for r in requests}
            for leaf in jax.tree.leaves((self.runtime._kv, self.runtime._state, self.runtime._last_tokens)):
                leaf.delete()  # what a step that raises may leave behind
            raise self.error
        return self.call(step)


@pytest.fixture
def three(llm) -> list[Request]:
    """Two adapters and a third that waits: its prompt does not fit in the first prefill step."""
    return [
        add(llm, tokens(i, 9), name, max_tokens=m) for i, (name, m) in enumerate(zip("abc", (14, 9, 6), strict=True))
    ]


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("method", ["dispatch", "read"])
@pytest.mark.parametrize("which", [0, 2])
def test_a_step_that_fails_costs_its_own_requests_alone(llm, oracles, monkeypatch, three, which, method, nth):
    broken = Broken(llm, monkeypatch, method, three[which], nth, RuntimeError("the device said no"))
    before = llm.stats()["failed_steps"]
    outputs = drain(llm)
    errors = {id: outs[-1].error for id, outs in outputs.items() if outs[-1].error}
    assert three[which].request_id in errors and errors.keys() <= broken.lost
    assert all("the device said no" in str(e) for e in errors.values())
    assert llm.stats()["failed_steps"] == before + 1
    for r, name in zip(three, "abc", strict=True):
        got, want = given(outputs, r), expected(oracles[name], r)
        assert got == (want[: len(got)] if r.request_id in errors else want)


@pytest.mark.parametrize("method", ["dispatch", "read"])
def test_failures_apart_from_each_other_do_not_end_the_engine(llm, oracles, monkeypatch, method):
    for i in range(4):
        with monkeypatch.context() as patch:
            bad = add(llm, tokens(i, 5))
            Broken(llm, patch, method, bad, 2, RuntimeError("the device said no"))
            assert drain(llm)[bad.request_id][-1].error is not None


def test_what_is_in_flight_is_told_before_a_dispatch_fails(llm, oracles, monkeypatch):
    """The first request turns out to have ended in the step that ran while the next one, which holds it too, failed."""
    starts = ((ids, oracles[None].greedy(ids, 3)[0]) for ids in (tokens(seed, 5) for seed in range(20)))
    ids, stop = next((ids, want[2]) for ids, want in starts if want[2] not in want[:2])
    first, second = add(llm, ids, stop_token_ids=[stop]), add(llm, tokens(1, 5), max_tokens=9)
    broken = Broken(llm, monkeypatch, "dispatch", second, 4, RuntimeError("no"))
    outputs = drain(llm)
    assert broken.lost == {first.request_id, second.request_id}
    assert given(outputs, first) == expected(oracles[None], first) and len(outputs[first.request_id]) == 3
    assert outputs[first.request_id][-1].finish_reason == "stop"
    assert given(outputs, second) == expected(oracles[None], second)[:3] and outputs[second.request_id][-1].error


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("method", ["dispatch", "read"])
def test_an_interrupt_loses_no_token_and_repeats_none(llm, oracles, monkeypatch, three, method, nth):
    Broken(llm, monkeypatch, method, three[0], nth, KeyboardInterrupt())
    outputs, interrupts = drain_despite(KeyboardInterrupt, llm)
    llm.engine.check_integrity()
    assert interrupts == 1
    for r, name in zip(three, "abc", strict=True):
        assert given(outputs, r) == expected(oracles[name], r)


@pytest.mark.parametrize("second", ["forget", "make", "add"])
def test_a_second_interrupt_while_the_engine_starts_over_costs_nothing(llm, oracles, monkeypatch, three, second):
    """Ctrl-C twice: the second one comes while the first one's mess is cleared away."""
    engine, runtime = llm.engine, llm.engine._runtime
    Broken(llm, monkeypatch, "dispatch", three[0], 2, KeyboardInterrupt())
    seen = []

    def once(call):
        def broken(*args, **more):
            seen.append(1)
            if len(seen) == 1:
                raise KeyboardInterrupt
            return call(*args, **more)

        return broken

    target = {
        "make": (runtime, "_make_state"),
        "forget": (engine._slots, "forget_slots"),
        "add": (engine, "_new_scheduler"),
    }
    place, name = target[second]
    monkeypatch.setattr(place, name, once(getattr(place, name)))
    outputs, interrupts = drain_despite(KeyboardInterrupt, llm)
    assert interrupts == 2 and len(seen) >= 2
    for r, name in zip(three, "abc", strict=True):
        assert given(outputs, r) == expected(oracles[name], r)


def test_a_fault_in_the_bookkeeping_is_raised_once_and_costs_no_token(llm, oracles, monkeypatch, three):
    engine, count = llm.engine, [0]
    resolve = engine._scheduler.resolve

    def broken(plan, tokens):
        count[0] += 1
        if count[0] == 3:
            raise ValueError("a fault")
        return resolve(plan, tokens)

    monkeypatch.setattr(engine._scheduler, "resolve", broken)
    outputs, faults = drain_despite(ValueError, llm)
    assert faults == 1
    for r, name in zip(three, "abc", strict=True):
        assert given(outputs, r) == expected(oracles[name], r)


def test_an_interrupt_between_two_outputs_of_a_step_delivers_the_first(llm, oracles, monkeypatch):
    """What was counted as given is given, by the next call."""
    requests = [add(llm, tokens(i, 5), max_tokens=3) for i in (1, 2)]
    engine, ended = llm.engine, []
    end = engine._end

    def broken(output):
        end(output)
        ended.append(output)
        if len(ended) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_end", broken)
    outputs, interrupts = drain_despite(KeyboardInterrupt, llm)
    assert interrupts == 1
    for request in requests:
        assert given(outputs, request) == expected(oracles[None], request)


def test_nothing_keeps_an_adapter_that_was_unloaded(llm, adapters):
    """Neither a step begun ahead for a request that had ended, nor the memory of who lacked a slot."""
    engine = llm.engine
    kept = {name: weakref.ref(engine._slots.get(name)) for name in "abc"}
    for name in "abc":  # three adapters, two slots: one lacks a slot
        add(llm, tokens(7, 4), name, max_tokens=3)
    drain(llm)
    for name in "abc":
        engine.unload_lora(name)
    engine.drain()
    gc.collect()
    assert {name: ref() for name, ref in kept.items()} == dict.fromkeys("abc")


@pytest.mark.parametrize("method", ["dispatch", "read"])
def test_an_engine_whose_steps_keep_failing_dies(llm, oracles, monkeypatch, method):
    engine = llm.engine

    def broken(step):
        raise RuntimeError("the device said no")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runtime, method, broken)
        for i in range(8):
            add(llm, tokens(i, 12))  # one a step
        with pytest.raises(EngineDeadError, match="3 steps in a row"):
            drain(llm)
        with pytest.raises(EngineDeadError):
            engine.step()
        with pytest.raises(EngineDeadError):
            add(llm, tokens(0, 5))
    engine._dead, engine._failed_in_a_row = None, 0  # as if it were another engine
    engine._start_over()
    for request_id in list(engine._outputs):
        engine.abort(request_id)
    engine.step()
    last = add(llm, tokens(1, 5), "a")
    assert given(drain(llm), last) == expected(oracles["a"], last)


def test_an_adapter_goes_while_its_step_is_in_flight(llm, oracles, adapters):
    engine, ids = llm.engine, tokens(6, 6)
    running = add(llm, ids, "a", max_tokens=5)
    engine.step()
    engine.step()
    engine.unload_lora("a")
    engine.load_lora("b", str(adapters["c"]), replace=True)
    others = [add(llm, ids, "b", max_tokens=5), add(llm, ids, "c", max_tokens=5)]
    outputs = drain(llm)
    assert running.output_token_ids == expected(oracles["a"], running)
    for r in others:
        assert given(outputs, r) == expected(oracles["c"], r)
