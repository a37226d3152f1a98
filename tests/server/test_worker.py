"""The bridge between the engine's thread and asyncio, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from lora_jax.errors import EngineDeadError
from lora_jax.request import LoRARequest, Request, SamplingParams
from lora_jax.server.worker import EngineWorker
from tests.support.fake_engine import FakeEngine, answer


def run(test: Callable[[FakeEngine, EngineWorker], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        worker = EngineWorker(engine)
        worker.start()
        try:
            await asyncio.wait_for(test(engine, worker), 20)
        finally:
            engine.gate.set()
            assert await worker.stop()

    asyncio.run(main())


def request(engine: FakeEngine, prompt: str, tokens: int, name: str = "r", adapter: str | None = None) -> Request:
    lora = LoRARequest(adapter) if adapter else None
    return engine.make_request(prompt, SamplingParams(max_tokens=tokens), lora, name)


async def text_of(worker: EngineWorker, req: Request) -> str:
    return "".join([out.text async for out in worker.generate(req)])


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_many_requests_each_get_their_own_output() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        names = [None, "up1", "up2"]
        jobs = [(f"prompt {i}", 5 + i % 7, names[i % 3], i % 3) for i in range(100)]
        texts = await asyncio.gather(
            *(text_of(worker, request(engine, p, n, f"r{i}", a)) for i, (p, n, a, _) in enumerate(jobs))
        )
        assert texts == [answer(p, n, shift) for p, n, _, shift in jobs]
        assert engine.aborts == [] and worker.open_requests == 0

    run(test)


def test_several_requests_of_one_call() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        requests = [request(engine, "ab", 3, "x"), request(engine, "cd", 6, "y")]
        texts = {"x": "", "y": ""}
        async for out in worker.generate_many(requests):
            texts[out.request_id] += out.text
        assert texts == {"x": "aba", "y": "cdcdcd"} and engine.aborts == []

    run(test)


def test_leaving_early_aborts_what_is_unfinished_once() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        requests = [request(engine, "ab", 1, "short"), request(engine, "cd", 4000, "long")]
        engine.delay = 0.001
        async with aclosing(worker.generate_many(requests)) as outputs:
            async for out in outputs:
                if out.finished:
                    assert out.request_id == "short"
                if out.request_id == "long" and worker.open_requests == 1:
                    break
        assert engine.aborts == ["long"] and worker.open_requests == 0
        await until(lambda: not engine.has_unfinished())

    run(test)


def test_cancelling_aborts_once() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        engine.gate.clear()
        task = asyncio.ensure_future(text_of(worker, request(engine, "ab", 4)))
        await until(lambda: worker.open_requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.aborts == ["r"]

    run(test)


def test_a_slow_consumer_gets_merged_outputs_and_holds_nobody_up() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        params = SamplingParams(max_tokens=500, logprobs=1)
        slow = worker.generate(engine.make_request("slow", params, None, "slow"))
        first = await anext(slow)
        assert await text_of(worker, request(engine, "quick", 600, "quick")) == answer("quick", 600)
        await until(lambda: worker.open_requests == 0)
        rest = [out async for out in slow]
        assert len(rest) == 1  # hundreds of steps, one output
        ids = first.token_ids + rest[0].token_ids
        assert first.text + rest[0].text == answer("slow", 500)
        assert [list(entry)[0] for entry in (first.logprobs or []) + (rest[0].logprobs or [])] == ids
        assert rest[0].finish_reason == "length" and engine.aborts == []

    run(test)


def test_merging_leaves_the_engines_lists_alone() -> None:
    from lora_jax.request import StepOutput
    from lora_jax.server.worker import _Mailbox

    async def test() -> None:
        box, parts = _Mailbox(), [StepOutput("r", [i], str(i)) for i in range(3)]
        for part in parts:
            box.put(part)
        (merged,) = await box.take()
        assert (merged.token_ids, merged.text) == ([0, 1, 2], "012")
        assert [part.token_ids for part in parts] == [[0], [1], [2]]

    asyncio.run(test())


def test_an_idle_engine_is_neither_stepped_nor_polled() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        await text_of(worker, request(engine, "ab", 2))
        await asyncio.sleep(0.05)
        before = engine.steps, engine.polls
        await asyncio.sleep(0.2)
        assert (engine.steps, engine.polls) == before
        assert await text_of(worker, request(engine, "ab", 2, "again")) == "ab"  # and it wakes up

    run(test)


@pytest.mark.parametrize("crash", [RuntimeError("device lost"), SystemExit(3)])
def test_a_dead_engine_fails_every_open_request(crash: BaseException) -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        deaths: list[int] = []
        worker.on_death = lambda: deaths.append(worker.open_requests)
        engine.gate.clear()
        tasks = [asyncio.ensure_future(text_of(worker, request(engine, "ab", 9, f"r{i}"))) for i in range(5)]
        await until(lambda: worker.open_requests == 5)
        engine.crash = crash
        engine.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [EngineDeadError] * 5
        assert str(crash) in str(results[0])
        await until(lambda: deaths)
        assert deaths == [0] and engine.aborts == []
        with pytest.raises(EngineDeadError):
            await text_of(worker, request(engine, "ab", 9, "late"))
        assert worker.open_requests == 0

    run(test)


def test_a_death_reaches_a_consumer_that_was_busy_elsewhere() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        engine.delay = 0.001
        outputs = worker.generate(request(engine, "ab", 4000))
        await anext(outputs)
        engine.crash = RuntimeError("device lost")
        await until(lambda: worker.open_requests == 0)
        with pytest.raises(EngineDeadError):
            async for _ in outputs:
                pass

    run(test)


def test_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        engine.gate.clear()
        task = asyncio.ensure_future(text_of(worker, request(engine, "abc", 50)))
        await until(lambda: worker.open_requests)
        drained = asyncio.ensure_future(worker.drain(20))
        await until(lambda: worker.closing)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await text_of(worker, request(engine, "abc", 5, "late"))
        engine.gate.set()
        assert await task == answer("abc", 50)
        await drained
        assert engine.aborts == []

    run(test)


def test_drain_ends_what_does_not_finish() -> None:
    async def test(engine: FakeEngine, worker: EngineWorker) -> None:
        engine.gate.clear()
        task = asyncio.ensure_future(text_of(worker, request(engine, "abc", 50)))
        await until(lambda: worker.open_requests)
        await worker.drain(0.01)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await task
        assert engine.aborts == ["r"]

    run(test)
