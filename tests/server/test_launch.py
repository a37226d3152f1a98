"""Whole server processes: start, signals, exit codes. The engine is the fake one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lora_jax.errors import ConfigError
from lora_jax.server.launch import bind
from tests.server.conftest import wait_for

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from lora_jax import cli
from lora_jax.server import launch
from tests.support.fake_engine import FakeEngine

def build_engine(args):
    print("loading", args.model, flush=True)
    engine = FakeEngine(adapters={m.partition("=")[0]: 1 for m in args.lora_modules})
    class Crash(str):
        pass
    make = engine.make_request
    def make_request(prompt, *rest):
        if prompt == "crash":
            engine.crash = RuntimeError("device lost")
        if prompt == "slow":
            engine.delay = 0.01
        if prompt == "stuck":
            engine.gate.clear()
        return make(prompt, *rest)
    engine.make_request = make_request
    return engine

launch.build_engine = build_engine
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


class Process:
    def __init__(self, *options: str):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", PROGRAM, *options]
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def url(self) -> str:
        wait_for(lambda: any("http://" in line for line in self.lines) or self.process.poll() is not None, 60)
        line = next((line for line in self.lines if line.startswith("lora-jax: http://")), None)
        assert line, self.lines
        return line.split()[1]

    def end(self, sig: int | None = None) -> int:
        if sig is not None:
            self.process.send_signal(sig)
        code = self.process.wait(60)
        self.reader.join(10)
        return code


@contextlib.contextmanager
def process(*options: str) -> Iterator[Process]:
    p = Process(*options)
    try:
        yield p
    finally:
        if p.process.poll() is None:
            p.process.kill()
        p.process.wait(20)
        p.reader.join(10)
        assert p.process.stdout is not None
        p.process.stdout.close()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal_and_exits_with_zero(sig: int) -> None:
    with process("some/model", "--port", "0", "--served-model-name", "m", "n", "--lora-modules", "a=/x") as p:
        url = p.url()
        assert httpx.get(url + "/health", trust_env=False).status_code == 200
        out = httpx.post(url + "/v1/completions", json={"model": "a", "prompt": "ab", "max_tokens": 2}, trust_env=False)
        assert out.json()["choices"][0]["text"] == "bc"
        assert p.end(sig) == 0
        assert f"lora-jax: {url} serves m, n; adapters: a" in p.lines
        assert not any("Traceback" in line for line in p.lines)


def test_open_requests_finish_or_are_told_within_the_grace() -> None:
    with process("m", "--port", "0", "--shutdown-grace", "0.2") as p:
        body = {"prompt": "slow", "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", p.url() + "/v1/completions", json=body, timeout=60, trust_env=False) as response:
            lines = response.iter_lines()
            next(lines)
            p.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "shutting down" in rest[-2] and rest[-1] == "data: [DONE]"
        assert p.end() == 0


def test_a_dead_engine_ends_the_process_with_one() -> None:
    with process("m", "--port", "0") as p:
        out = httpx.post(p.url() + "/v1/completions", json={"prompt": "crash"}, timeout=60, trust_env=False)
        assert out.status_code == 503 and "device lost" in out.json()["error"]["message"]
        assert p.end() == 1


def test_an_engine_that_is_stuck_does_not_keep_the_process() -> None:
    with process("m", "--port", "0", "--shutdown-grace", "0") as p:
        url = p.url()
        with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
            client.post(url + "/v1/completions", json={"prompt": "stuck"}, timeout=0.3)
        p.process.send_signal(signal.SIGTERM)
        wait_for(lambda: any("Shutting down" in line for line in p.lines))
        assert p.end(signal.SIGTERM) == 0  # the second signal does not wait
        assert "lora-jax: the engine did not stop in time; leaving without it" in p.lines


def test_a_taken_port_is_told_before_the_model_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with process("m", "--port", str(port)) as p:
            assert p.end() == 2
            assert len(p.lines) == 1 and f"cannot listen on 127.0.0.1 port {port}" in p.lines[0]
        with pytest.raises(ConfigError, match=f"port {port}"):
            bind("127.0.0.1", port)


def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="host 'no such host'"):
        bind("no such host", 0)
    bind("localhost", 0).close()
