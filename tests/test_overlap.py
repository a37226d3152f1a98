"""One step of lookahead: the device has the next step before the host reads this one, and nothing changes but the time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.errors import EngineDeadError
from lora_jax.request import Request, StepOutput
from lora_jax.step_keys import StepKey
from tests.support import tiny

GREEDY = dict(temperature=0.0, ignore_eos=True)


def tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, n).tolist()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        family, options = tiny.ARCHITECTURES["llama"]
        patch.setitem(tiny.ARCHITECTURES, "flat", (family, {**options, "num_hidden_layers": 1}))
        return tiny.save_base("flat", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> dict[str, Path]:
    return {name: tiny.save_adapter(base, tmp_path_factory.mktemp(name), seed=ord(name)) for name in "abc"}


@pytest.fixture(scope="module")
def oracles(base, adapters) -> dict[str | None, tiny.Oracle]:
    return {None: tiny.Oracle(base), **{name: tiny.Oracle(base, path) for name, path in adapters.items()}}


@pytest.fixture(scope="module")
def engine_of_module(base) -> LLM:
    """Few pages and slots: requests are preempted, adapters change places."""
    small = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48, page_size=4, num_pages=15, max_loras=2)
    return LLM(str(base), enable_lora=True, max_lora_rank=4, disable_tqdm=True, **small)


@pytest.fixture
def llm(engine_of_module, adapters):
    engine = engine_of_module.engine
    for name, path in adapters.items():
        engine.load_lora(name, str(path))
    yield engine_of_module
    engine.step()
    engine.check_integrity()
    assert engine._in_flight is None and not engine._outputs
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["compilations_after_warmup"] == 0, stats
    assert stats["free_pages"] == 14
    for report in engine.list_loras():
        engine.unload_lora(report.name)


def add(llm: LLM, ids: list[int], lora: str | None = None, id: str | None = None, **params: Any) -> Request:
    params = {**GREEDY, "max_tokens": 8, **params}
    prompt: Any = {"prompt_token_ids": ids}
    request = llm.engine.make_request(prompt, SamplingParams(**params), lora and LoRARequest(lora), id)
    llm.engine.add_request(request)
    return request


def drain(llm: LLM, after: Callable[[], None] = lambda: None) -> dict[str, list[StepOutput]]:
    """Outputs of each request, until all have ended."""
    outputs: dict[str, list[StepOutput]] = {}
    while llm.engine.has_unfinished():
        for out in llm.engine.step():
            outputs.setdefault(out.request_id, []).append(out)
        llm.engine.check_integrity()
        after()
    return outputs


def given(outputs: dict[str, list[StepOutput]], request: Request) -> list[int]:
    return [t for out in outputs[request.request_id] for t in out.token_ids]


def expected(oracle: tiny.Oracle, request: Request) -> list[int]:
    """What transformers chooses, up to the request's stop token."""
    want, margin = oracle.greedy(request.prompt_token_ids, request.max_tokens)
    assert margin > 1e-4
    stops = [i for i, t in enumerate(want) if t in (request.params.stop_token_ids or ())]
    return want[: stops[0] + 1] if stops else want


# -- the overlap itself --


def test_the_next_step_is_dispatched_before_this_one_is_read(llm, monkeypatch):
    runtime, events, plans = llm.engine._runtime, [], []
    dispatch, read = runtime.dispatch, runtime.read

    def dispatched(plan):
        events.append(f"dispatch {len(plans)}")
        plans.append(plan)
        return dispatch(plan)

    def is_read(step):
        events.append(f"read {plans.index(step.plan)}")
        return read(step)

    monkeypatch.setattr(runtime, "dispatch", dispatched)
    monkeypatch.setattr(runtime, "read", is_read)
    add(llm, tokens(0, 5), max_tokens=4)
    sizes = [len(llm.engine.step()) for _ in range(5)]
    assert events == [
        *("dispatch 0", "dispatch 1", "read 0", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3"),
    ], "no step is dispatched for a token that max_tokens forbids"
    assert sizes == [0, 1, 1, 1, 1] and not llm.engine.has_unfinished()


def test_decode_takes_its_tokens_from_the_device(llm, oracles):
    requests = [add(llm, tokens(i, 5 + i)) for i in range(3)]

    def poison() -> None:
        for r in requests:
            r.token_ids[len(r.prompt_token_ids) :] = [3] * r.num_output

    outputs = drain(llm, poison)
    assert llm.stats()["preemptions"] == 0
    for r in requests:
        assert given(outputs, r) == expected(oracles[None], r) and set(r.output_token_ids) == {3}


def test_the_step_after_a_broken_token_is_harmless(llm):
    """-1, where the logits were not finite, counts as token 0."""
    runtime, table = llm.engine._runtime, llm.step_table
    meta = runtime.spec.builder.decode((), 1, runtime.spec.builder.table())

    def logits(token: int) -> np.ndarray:
        kv, *_ = table[StepKey("init", 1)]()  # pages of its own: a step takes them
        last_tokens = np.full(runtime._last_tokens.shape, token, np.int32)
        return np.asarray(table[StepKey("decode", 1)](runtime._params, kv, last_tokens, meta)[0])

    assert logits(-1).tobytes() == logits(0).tobytes() != logits(tiny.VOCAB - 1).tobytes()
    assert np.isfinite(logits(-1)).all()


def test_the_engine_is_not_locked_while_it_waits_for_the_device(llm, oracles, monkeypatch):
    runtime, read = llm.engine._runtime, llm.engine._runtime.read
    waits, goes_on = threading.Event(), threading.Event()

    def slow(step):
        waits.set()
        assert goes_on.wait(60)
        return read(step)

    monkeypatch.setattr(runtime, "read", slow)
    add(llm, tokens(0, 5), max_tokens=2)
    thread = threading.Thread(target=drain, args=(llm,))
    thread.start()
    assert waits.wait(60)
    adding = threading.Thread(target=add, args=(llm, tokens(1, 5)))
    adding.start()
    adding.join(60)
    came_in = not adding.is_alive()
    goes_on.set()
    thread.join(60)
    assert came_in and not thread.is_alive()


# -- what late knowledge must not change --


def test_crowded_mixed_and_stopped_requests_equal_the_oracle(llm, oracles, monkeypatch):
    """Preemption with a token in flight, ends that are found one step late, three adapters in two slots."""
    scheduler, late = llm.engine._scheduler, []
    requeue = scheduler._requeue
    monkeypatch.setattr(scheduler, "_requeue", lambda r: (late.append(r.pending), requeue(r))[1])
    requests = []
    for i, lora in enumerate([None, "a", "b", "c", "a", None, "c", "b", "a", None]):
        ids = tokens(i, 4 + 2 * i)
        stop = oracles[lora].greedy(ids, 12)[0][5 + i % 3] if i % 2 else None
        requests.append(add(llm, ids, lora, max_tokens=12, stop_token_ids=None if stop is None else [stop]))
    outputs = drain(llm)
    for r in requests:
        assert given(outputs, r) == expected(oracles[r.adapter and r.adapter.name], r)
        last = outputs[r.request_id][-1]
        assert last.finish_reason == ("stop" if r.params.stop_token_ids else "length")
    assert 1 in late, "no request was preempted while its token was in flight"


def test_draws_and_penalties_are_those_of_steps_one_by_one(llm, monkeypatch):
    every = [
        dict(temperature=1.3, seed=1),
        dict(temperature=0.7, seed=2, top_p=0.8, frequency_penalty=0.7),
        dict(temperature=0.0, repetition_penalty=1.9, presence_penalty=0.4),
        dict(temperature=1.0, seed=3, min_tokens=6, stop_token_ids=tokens(9, 16)),
        dict(temperature=0.0, logprobs=2, prompt_logprobs=1),
        dict(temperature=1.1),
    ]

    def run() -> list[Any]:
        before = llm.stats()["preemptions"]
        requests = [add(llm, tokens(i, 6), id=f"fixed-{i}", max_tokens=14, **p) for i, p in enumerate(every)]
        outputs = drain(llm)
        assert llm.stats()["preemptions"] > before
        assert [len(out.prompt_logprobs or []) for out in outputs["fixed-4"]] == [6] + [0] * 13
        assert all(list(lp)[0] == t for out in outputs["fixed-4"] for lp, t in zip(out.logprobs, out.token_ids))  # noqa: B905
        return [given(outputs, r) for r in requests]

    ahead = run()
    engine, plan = llm.engine, llm.engine._scheduler.plan
    monkeypatch.setattr(engine._scheduler, "plan", lambda: None if engine._in_flight else plan())
    assert run() == ahead


def test_a_step_that_nobody_waits_for_is_drained(llm, oracles):
    engine, ids = llm.engine, tokens(3, 6)
    want, _ = oracles["a"].greedy(ids, 8)
    at = next(i for i in range(2, 8) if want[i] not in want[:i])
    request = add(llm, ids, "a", stop_token_ids=[want[at]])
    assert given(drain(llm), request) == want[: at + 1]
    assert engine._in_flight is not None, "the step after the end was not dispatched: is the overlap gone?"
    assert not engine.has_unfinished() and engine.stats()["free_pages"] == 14
    engine.check_integrity()
    new = [
        add(llm, tokens(4, 9), "b", id=request.request_id),
        add(llm, tokens(5, 3), "c"),
    ]  # the same id, row and pages
    outputs = drain(llm)
    for r, name in zip(new, "bc", strict=True):
        assert given(outputs, r) == expected(oracles[name], r)
    assert engine.step() == [] and engine._in_flight is None


def test_an_id_used_again_gets_nothing_of_its_old_step(llm, oracles):
    engine = llm.engine
    add(llm, tokens(1, 12), id="x", prompt_logprobs=1, logprobs=1)
    assert engine.step() == []
    engine.abort("x")
    outs = engine.step()
    assert [(out.request_id, out.finish_reason) for out in outs] == [("x", "abort")] and not engine.has_unfinished()
    add(llm, tokens(1, 12), id="x", prompt_logprobs=1, logprobs=1)
    engine.step()
    engine.abort("x")
    with engine._lock:
        aborted = engine._take_aborts()
    new = add(llm, tokens(2, 5), id="x")
    outputs = drain(llm)
    assert len(aborted) == 1 and given(outputs, new) == expected(oracles[None], new)
    assert all(out.logprobs is None and out.prompt_logprobs is None for out in outputs["x"])


# -- what goes wrong --


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
    outputs: dict[str, list[StepOutput]] = {}
    interrupts = 0
    while llm.engine.has_unfinished():
        try:
            for out in llm.engine.step():
                outputs.setdefault(out.request_id, []).append(out)
        except KeyboardInterrupt:
            interrupts += 1
            assert llm.engine._in_flight is None
        llm.engine.check_integrity()
    assert interrupts == 1
    for r, name in zip(three, "abc", strict=True):
        assert given(outputs, r) == expected(oracles[name], r)


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
    engine._runtime.recover()
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
