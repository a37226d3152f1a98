"""Drives the engine in one thread and hands what it produces to asyncio.

The thread steps while there is work and waits on a condition otherwise. Who waits for which request is known to the
event loop alone, so that table needs no lock: the thread posts each step's outputs to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import EngineDeadError
from ..request import Request, StepOutput
from .engine_api import ServedEngine

log = logging.getLogger(__name__)


class EngineWorker:
    """Runs `engine.step()` and streams its outputs.

    `start`, `generate`, `drain` and `stop` belong to one event loop. `on_death` is called once, in that loop, when a
    step has raised: every open request has failed with EngineDeadError by then.
    """

    def __init__(self, engine: ServedEngine, on_death: Callable[[], None] | None = None):
        self.engine = engine
        self.error: EngineDeadError | None = None  # set once, when the engine is dead
        self.closing = False
        self.on_death = on_death
        self._streams: dict[str, _Mailbox] = {}
        self._wakeup = threading.Condition()
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lora-jax-engine", daemon=True)

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    def check_open(self) -> None:
        """Raises EngineDeadError when no request can be accepted any more."""
        if self.error is not None:
            raise self.error
        if self.closing:
            raise EngineDeadError("the server is shutting down")

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread look for work again. Any thread."""
        with self._wakeup:
            self._wakeup.notify()

    def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """`generate_many` of one request."""
        return self.generate_many([request])

    async def generate_many(self, requests: Sequence[Request]) -> AsyncGenerator[StepOutput, None]:
        """Runs the requests together; yields what each step adds to each, until all are finished.

        A consumer that falls behind gets several steps merged into one output, so a slow one costs no more memory than
        its text and holds nobody up. Leaving early (close it, or cancel) aborts what is unfinished, each once.

        Raises: EngineDeadError when the engine is or becomes dead, or the server shuts down.
        """
        self.check_open()
        box = _Mailbox()
        try:
            for request in requests:
                self.engine.add_request(request)
                box.live.add(request.request_id)
                self._streams[request.request_id] = box
                self._idle.clear()
            self.wake()
            self.check_open()  # the engine may have died between the first check and the registration
            while box.live or box.pending or box.error:
                for output in await box.take():
                    yield output
        finally:
            self._abandon(box)

    async def drain(self, grace: float) -> None:
        """Refuses new requests, gives open ones `grace` seconds, then fails what is left."""
        self.closing = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            self._fail_all(EngineDeadError("the server is shutting down"), abort=True)

    async def stop(self, timeout: float = 10.0) -> bool:
        """Ends the thread after the step it is in. False: it did not end within `timeout` seconds."""
        self.closing = True
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout)
        self._fail_all(EngineDeadError("the server has stopped"), abort=False)
        return not self._thread.is_alive()

    # the engine's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                outputs = self.engine.step()
                if outputs:
                    self._post(self._deliver, outputs)
        except BaseException as exc:  # whatever it is, nobody may be left waiting
            log.exception("the engine has failed; every open request fails and the server stops")
            error = EngineDeadError(f"the engine has stopped after a failure: {type(exc).__name__}: {exc}")
            self.error = error
            self._post(self._die, error)

    def _wait_for_work(self) -> bool:
        self.engine.drain()
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._stopping or self.engine.has_unfinished())
            return not self._stopping

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            log.debug("an output came after the event loop had closed")

    # the event loop

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            box = self._streams.get(output.request_id)
            if box is not None:  # else its client has left
                if output.finished:
                    self._forget(box, output.request_id)
                box.put(output)

    def _forget(self, box: _Mailbox, request_id: str) -> None:
        box.live.discard(request_id)
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _abandon(self, box: _Mailbox) -> None:
        for request_id in list(box.live):
            self._forget(box, request_id)
            if self.error is None:
                self.engine.abort(request_id)
        self.wake()

    def _die(self, error: EngineDeadError) -> None:
        self._fail_all(error, abort=False)
        if self.on_death is not None:
            self.on_death()

    def _fail_all(self, error: EngineDeadError, *, abort: bool) -> None:
        for request_id, box in list(self._streams.items()):
            self._forget(box, request_id)
            if abort:
                self.engine.abort(request_id)
            box.fail(error)
        self.wake()


class _Mailbox:
    """What one consumer has not taken yet: at most one merged output a request."""

    def __init__(self) -> None:
        self.live: set[str] = set()  # requests that the engine has not finished
        self.pending: dict[str, StepOutput] = {}
        self._merged: set[str] = set()  # pending outputs whose lists are ours to extend
        self.error: EngineDeadError | None = None
        self._ready = asyncio.Event()

    def put(self, new: StepOutput) -> None:
        old = self.pending.get(new.request_id)
        if old is None:
            self.pending[new.request_id] = new
        else:
            if new.request_id not in self._merged:
                self._merged.add(new.request_id)
                old = replace(old, token_ids=list(old.token_ids), logprobs=_copy(old.logprobs))
                self.pending[new.request_id] = old
            _append(old, new)
        self._ready.set()

    def fail(self, error: EngineDeadError) -> None:
        self.error = error
        self._ready.set()

    async def take(self) -> list[StepOutput]:
        """Waits for news. What arrived before a failure is handed out before the failure is raised."""
        await self._ready.wait()
        outputs = list(self.pending.values())
        self.pending.clear()
        self._merged.clear()
        if self.error is None:
            self._ready.clear()
        elif not outputs:
            raise self.error
        return outputs


def _copy(items: list | None) -> list | None:
    return None if items is None else list(items)


def _append(old: StepOutput, new: StepOutput) -> None:
    old.token_ids += new.token_ids
    old.text += new.text
    if new.logprobs:
        if old.logprobs is None:
            old.logprobs = []
        old.logprobs += new.logprobs
    old.prompt_logprobs = old.prompt_logprobs if new.prompt_logprobs is None else new.prompt_logprobs
    old.finish_reason, old.stop_reason, old.error = new.finish_reason, new.stop_reason, new.error
