"""One step of lookahead: the device has the next step before the host reads this one, and nothing changes but the time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from lora_jax.step_keys import StepKey
from tests.support import tiny
from tests.support.overlap import add, drain, expected, given, tokens

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
        return np.asarray(table[StepKey("decode", 1)](runtime._params, kv, last_tokens, meta)[1])

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
        engine._take_aborts()
    aborted, engine._undelivered = engine._undelivered, []
    new = add(llm, tokens(2, 5), id="x")
    outputs = drain(llm)
    assert len(aborted) == 1 and given(outputs, new) == expected(oracles[None], new)
    assert all(out.logprobs is None and out.prompt_logprobs is None for out in outputs["x"])
