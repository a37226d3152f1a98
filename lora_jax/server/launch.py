"""From options to a serving process and its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Generator
from typing import Any

import uvicorn

from ..config import EngineArgs
from ..errors import ConfigError
from .app import create_app
from .options import ServerArgs
from .worker import EngineWorker

# What uvicorn adds to the grace before it cuts connections whose clients do not read.
EXTRA_SHUTDOWN_S = 3


def build_engine(args: EngineArgs) -> Any:
    """Loads the model. A function of its own so that tests can put another engine here."""
    from ..engine import Engine

    return Engine(args)


def serve(engine_args: EngineArgs, args: ServerArgs) -> int:
    """Serves until SIGTERM or SIGINT (exit code 0) or until the engine dies (1).

    Raises: ConfigError when the port is taken, before the model is loaded; whatever loading raises.
    """
    names = args.names(engine_args)
    with bind(args.host, args.port) as sock:
        return asyncio.run(_serve(build_engine(engine_args), args, names, sock))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not kept waiting, while the model loads."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise ConfigError(f"host {host!r} cannot be resolved: {exc.strerror or exc}") from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {exc.strerror}; choose another --host or --port"
        ) from None
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal and so hides the exit code."""

    ready_line = ""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            print(self.ready_line, flush=True)


async def _serve(engine: Any, args: ServerArgs, names: tuple[str, ...], sock: socket.socket) -> int:
    gc.collect()
    gc.freeze()  # what the start has made stays: a collection that walks all of it would hold the steps up
    worker = EngineWorker(engine)
    app = create_app(engine, args, names, worker)
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="on",
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_graceful_shutdown=int(args.shutdown_grace) + EXTRA_SHUTDOWN_S,
        )
    )
    server.ready_line = ready_line(sock, names, list(app.state.serving.catalog.adapters()))

    def dead() -> None:
        server.should_exit = True

    worker.on_death = dead
    with _signals(server, worker, args.shutdown_grace):
        try:
            await server.serve(sockets=[sock])
        except OSError as exc:  # another process began to listen while the model was loading
            raise ConfigError(f"cannot listen on {args.host} port {args.port}: {exc.strerror}") from None
    code = 0 if worker.error is None else 1
    if not (await worker.stop(timeout=2.0)):
        # The engine's thread is stuck in a step. Leaving the normal way would wait for it, or pull JAX from under it.
        print("lora-jax: the engine did not stop in time; leaving without it", file=sys.stderr, flush=True)
        os._exit(code)
    return code


@contextlib.contextmanager
def _signals(server: uvicorn.Server, worker: EngineWorker, grace: float) -> Generator[None, None, None]:
    """The first signal ends the server gently, a second one at once."""
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task] = []  # holds the task, which the loop itself does not

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
            return
        server.should_exit = True
        draining.append(loop.create_task(worker.drain(grace)))

    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, stop)
    try:
        yield
    finally:
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(sig)
        for task in draining:
            task.cancel()


def ready_line(sock: socket.socket, names: tuple[str, ...], adapters: list[str]) -> str:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"lora-jax: http://{shown}:{port} serves {', '.join(names)}; adapters: {', '.join(adapters) or 'none'}"
