"""A real uvicorn on a loopback port in front of a FakeEngine."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parents[2]))

from lora_jax.server.app import create_app
from lora_jax.server.options import ServerArgs
from lora_jax.server.worker import EngineWorker
from tests.support.fake_engine import FakeEngine

NAMES = ("base", "alias")


@dataclass
class Running:
    """A server under test. `http` and `openai` are clients of it."""

    engine: FakeEngine
    worker: EngineWorker
    port: int
    http: httpx.Client
    openai: OpenAI
    died: list[bool] = field(default_factory=list)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Polls until the condition holds; fails the test when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "a condition did not come true in time"
        time.sleep(0.005)


@contextlib.contextmanager
def running(engine: FakeEngine | None = None, **options: Any) -> Iterator[Running]:
    os.environ["NO_PROXY"] = "127.0.0.1"
    engine = engine or FakeEngine()
    worker, died = EngineWorker(engine), []
    worker.on_death = lambda: died.append(True)
    app = create_app(engine, ServerArgs(**options), NAMES, worker)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive())
    url = f"http://127.0.0.1:{port}"
    try:
        with (
            httpx.Client(base_url=url, timeout=30, trust_env=False) as http,
            OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=30) as client,
        ):
            yield Running(engine, worker, port, http, client, died)
    finally:
        engine.gate.set()
        server.should_exit = True
        thread.join(20)
        sock.close()
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Any]]:
    """[context, Running] of the server that a module's tests share while it lives, or nothing."""
    slot: list[Any] = []
    yield slot
    if slot:
        slot[0].__exit__(None, None, None)


@pytest.fixture
def server(shared: list[Any]) -> Iterator[Running]:
    if not shared:
        context = running()
        shared[:] = [context, context.__enter__()]
    r: Running = shared[1]
    yield r
    if r.worker.error is not None:  # a dead one is not used again
        shared.pop(0).__exit__(None, None, None)
        shared.clear()
        return
    r.engine.gate.set()
    r.engine.delay = 0.0
    wait_for(lambda: not r.engine.has_unfinished() and not r.worker.open_requests)
    r.engine.reset()


@pytest.fixture
def start() -> Callable[..., Any]:
    """Starts a server of its own: `with start(engine, option=...) as server`."""
    return running
