"""The demo's server: a subprocess on a free loopback port, watched while it starts, stopped whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL_BYTES = 6000
STOP_SECONDS = 20.0
DYING_SECONDS = 2.0


class DemoError(Exception):
    """The demo cannot go on; the message is for the person who started it."""


class Server:
    """A running server process. `show`: whether its output is copied to stderr; its last part is kept either way."""

    def __init__(self, command: list[str], port: int):
        self.url, self.show, self._tail = f"http://127.0.0.1:{port}", True, b""
        # No proxy, whatever the environment says: the server is on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        # Its own process group, so that Ctrl-C reaches the demo alone, which then stops it in good order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 4096):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self.show:
                sys.stderr.write(chunk.decode(errors="replace"))
                sys.stderr.flush()

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 120.0) -> Any:
        """GET, or POST of `body`; the answer's JSON (None when empty). Raises DemoError for any failure."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as e:
            raise DemoError(f"{path} answered {e.code}: {e.read().decode(errors='replace')[:500]}") from e
        except OSError as e:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a server that dies closes its connections first
                self._process.wait(DYING_SECONDS)
            raise DemoError(f"{path}: {e}{self._state()}") from e
        return json.loads(text) if text.strip() else None

    def wait_until_ready(self, seconds: float) -> None:
        """Return once /health answers. Raises DemoError when the process ends first or `seconds` have passed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise DemoError(f"the server did not start{self._state()}")
            with contextlib.suppress(OSError):
                self._opener.open(self.url + "/health", timeout=2).close()
                self.show = False
                return
            time.sleep(0.2)
        raise DemoError(f"the server was not ready after {seconds:.0f} s (--timeout){self._state()}")

    def tail(self) -> str:
        """The last lines of the server's output."""
        return "\n".join("  | " + line for line in self._tail.decode(errors="replace").splitlines()[-25:])

    def _state(self) -> str:
        """For error messages: how the process ended, if it did, and its last output, unless it stands above already."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=2)  # what it said last may still be in the pipe
        ended = "; the server is running" if code is None else f"; the server ended with status {code}"
        return ended + ("; its output is above" if self.show else f"; its last output:\n{self.tail()}")

    def stop(self) -> int:
        """SIGTERM, then SIGKILL to its whole group after 20 s. Returns the exit status; calling twice is fine."""
        self.show = False
        if self._process.poll() is None:
            self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        self._reader.join(timeout=2)
        if self._process.stdout and not self._reader.is_alive():
            self._process.stdout.close()
        return code


def free_port() -> int:
    """A loopback port that nobody listens on just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve_command() -> list[str]:
    """scripts/serve.py of a checkout; the same code through the installed package elsewhere."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "serve.py"
    if script.is_file():
        return [sys.executable, str(script), "--model", "demo"]
    return [sys.executable, "-m", "lora_jax.cli", "serve", "demo"]


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[Server]:
    """The server, stopped at the end of the block: after an error, Ctrl-C and SIGTERM as well."""

    def terminated(*_: Any) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, terminated)
    server = Server(command, port)
    try:
        yield server
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # stopping the server must not be interrupted half way
        server.stop()
        signal.signal(signal.SIGTERM, before)
