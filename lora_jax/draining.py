"""How a request that lacks nothing but a slot gets one in the end, though later requests whose adapters have slots pass it. Host
only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .plan import SlotSource
from .request import Request


class Draining:
    """The oldest such request. Once `max_passes` requests with adapters have passed it, the adapter with the fewest running
    requests at that time may not pass any more, nor may adapters that have no slot; another one follows when that is not room
    enough."""

    def __init__(self, max_passes: int):
        self.max_passes = max_passes
        self._request: Request | None = None
        self._passes = 0
        self._adapter: Any = None  # the one that drains

    def lacks(self, request: Request) -> None:
        """It is the oldest that lacks a slot, at this look at the queue."""
        if request is not self._request:
            self._request, self._passes, self._adapter = request, 0, None

    def ends(self, request: Request) -> None:
        """It runs, or has ended: nothing of it is kept, for it holds its adapter."""
        if request is self._request:
            self._request = self._adapter = None

    def passed(self) -> None:
        """By a later request with an adapter."""
        self._passes += 1

    def bars(self, adapter: Any, slots: SlotSource, running: Iterable[Request]) -> bool:
        """Whether this adapter may not pass: it runs and its slot is to come free, or it would take places that come free."""
        if self._passes < self.max_passes:
            return False
        if not slots.keeps(adapter):
            return True
        counts = Counter(r.adapter for r in running if r.adapter is not None)
        if self._adapter not in counts:
            self._adapter = min(counts, key=counts.__getitem__, default=None)
        return adapter is self._adapter
