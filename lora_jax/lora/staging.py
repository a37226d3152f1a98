"""Adapters on their way from host memory to device slots while steps run: another thread prepares what a slot is written from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from .adapter import Adapter

ROOM = 2  # adapters that lie prepared, each as large as a slot
STALE = 1.0  # seconds after which one that nobody has asked for again makes room

T = TypeVar("T")


@dataclass
class _Staged(Generic[T]):
    future: Future[T]
    asked: float


class Staging(Generic[T]):
    """prepare: gives what a slot is written from, for instance arrays on the device. Every method may be called from any thread."""

    def __init__(self, prepare: Callable[[Adapter], T], room: int = ROOM, clock: Callable[[], float] = time.monotonic):
        self._prepare, self._room, self._clock = prepare, room, clock
        self._lock = threading.Lock()
        self._staged: dict[Adapter, _Staged[T]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lora-jax-staging")

    def ready(self, adapter: Adapter) -> bool:
        """Whether `take` would not wait. Otherwise the adapter is being prepared, as soon as there is room for it: ask again."""
        with self._lock:
            staged, now = self._staged.get(adapter), self._clock()
            if staged is None:
                if len(self._staged) >= self._room and not self._make_room(now):
                    return False
                staged = self._staged[adapter] = _Staged(self._thread.submit(self._prepare, adapter), now)
            staged.asked = now
            return staged.future.done()

    def _make_room(self, now: float) -> bool:
        for adapter, staged in self._staged.items():
            if now - staged.asked > STALE and staged.future.done():
                del self._staged[adapter]
                return True
        return False

    def take(self, adapter: Adapter) -> T:
        """What `prepare` gives, once: waits for it, or calls it here where the adapter is not staged. Raises what it raises."""
        with self._lock:
            staged = self._staged.pop(adapter, None)
        return self._prepare(adapter) if staged is None else staged.future.result()

    def forget(self) -> None:
        """Drops all."""
        with self._lock:
            self._staged.clear()
