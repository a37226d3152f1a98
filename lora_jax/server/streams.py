"""Responses that end their work when the client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from .http import describe, dumps, error_response

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 300.0  # a client that takes nothing for so long counts as gone
T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Awaits `work`; cancels it and returns None when the client disconnects first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator of JSON-able chunks, ended by [DONE].

    The status line waits for the first chunk: what fails before gets a proper status, what fails later an event.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._emit_all(scope, receive, send)
        except _Stalled:
            log.warning("a client took nothing for %.0f s: its request is given up", SEND_TIMEOUT_S)

    async def _emit_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self.chunks) as chunks:
            try:
                async for chunk in chunks:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _send_text(send, f"data: {dumps(chunk)}\n\n")
            except _Stalled:
                raise
            except Exception as exc:
                if not started:
                    await error_response(exc)(scope, receive, send)
                    return
                status, body = describe(exc)
                if status == 500:
                    log.exception("a stream failed")
                await _send_text(send, f"data: {dumps(body)}\n\n")
        await _send_text(send, "data: [DONE]\n\n", more=False)


class _Stalled(Exception):
    """The client's receive window has been full for too long."""


async def _send_text(send: Send, text: str, more: bool = True) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
    except TimeoutError:
        raise _Stalled from None
