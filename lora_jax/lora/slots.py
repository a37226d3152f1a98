"""Which adapters are loaded, and which of them lie in a device slot. Host only: never imports jax.

Two tiers. The registry holds up to `max_cpu_loras` adapters in host memory by name. Up to `max_loras` adapters lie in
device slots; a slot is held while requests run with its adapter, and keeps its weights afterwards until another adapter
needs it. Requests hold adapter objects, not names: unloading or replacing a name never changes a request that runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from ..errors import AdapterCapacityError, AdapterError, AdapterNotFoundError
from .adapter import Adapter


@dataclass(frozen=True)
class SlotStats:
    """Counts since the start. hits: acquires that found their weights in a slot. writes: those that did not."""

    registered: int
    resident: int
    held: int
    hits: int
    writes: int
    evictions: int


class SlotManager:
    """The registry of adapters and the owner of the device slots. Every method may be called from any thread."""

    def __init__(self, max_loras: int, max_cpu_loras: int):
        """max_loras: device slots. max_cpu_loras: adapters that may be registered at once, >= max_loras."""
        assert 1 <= max_loras <= max_cpu_loras, f"max_loras={max_loras}, max_cpu_loras={max_cpu_loras}"
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        self._lock = threading.RLock()
        self._registry: dict[str, Adapter] = {}
        self._pinned: set[str] = set()
        self._slots: OrderedDict[Adapter, int] = OrderedDict()  # of the idle ones, least recently released first
        self._holds: dict[Adapter, int] = {}  # acquires without their release
        self._free = list(range(max_loras))
        self._hits = self._writes = self._evictions = 0

    # -- the registry --

    def register(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Makes an adapter available under its name. With replace, requests that run keep the adapter they have.

        Raises: AdapterError when the name is taken; AdapterCapacityError when max_cpu_loras adapters are registered.
        """
        with self._lock:
            old = self._registry.get(adapter.name)
            if old is not None and not replace:
                raise AdapterError(f"adapter {adapter.name!r} is loaded already: unload it first, or load with replace")
            if old is None and len(self._registry) >= self.max_cpu_loras:
                raise AdapterCapacityError(
                    f"cannot load adapter {adapter.name!r}: max_cpu_loras={self.max_cpu_loras} are loaded; unload "
                    f"one of {', '.join(sorted(self._registry))}, or raise max_cpu_loras"
                )
            self._registry[adapter.name] = adapter
            if old is not None and old is not adapter:
                self._vacate(old)

    def unregister(self, name: str) -> Adapter:
        """Forgets a name and its pin, and returns its adapter. Its slot is free at once, or when its last request ends.

        Raises: AdapterNotFoundError listing the names.
        """
        with self._lock:
            adapter = self.get(name)
            del self._registry[name]
            self._pinned.discard(name)
            self._vacate(adapter)
            return adapter

    def get(self, name: str) -> Adapter:
        """The adapter registered as `name`. Raises: AdapterNotFoundError listing the names."""
        with self._lock:
            if name not in self._registry:
                raise AdapterNotFoundError(name, list(self._registry))
            return self._registry[name]

    def adapters(self) -> list[Adapter]:
        """The registered adapters in order of registration."""
        with self._lock:
            return list(self._registry.values())

    def pin(self, name: str) -> None:
        """Keeps an adapter's slot, once it has one, for the adapter of this name.

        Raises: AdapterNotFoundError; AdapterCapacityError when no slot would be left for all other adapters.
        """
        with self._lock:
            self.get(name)
            if len(self._pinned | {name}) >= self.max_loras:
                raise AdapterCapacityError(
                    f"cannot pin adapter {name!r}: of max_loras={self.max_loras} slots one must stay free for others; "
                    f"pinned: {', '.join(sorted(self._pinned)) or 'none'}"
                )
            self._pinned.add(name)

    def unpin(self, name: str) -> None:
        """Ends `pin`; nothing happens to a name that is not pinned. Raises: AdapterNotFoundError."""
        with self._lock:
            self.get(name)
            self._pinned.discard(name)

    # -- the device slots --

    def acquire(self, adapter: Adapter) -> tuple[int, bool] | None:
        """(slot, must_write) for one request that is about to run; exactly one `release` must follow.

        must_write: the slot holds other weights; the caller writes this adapter before the next step reads the slot.
        None: every slot is held by running requests or pinned; ask again after a release.
        """
        with self._lock:
            slot = self._slots.get(adapter)
            must_write = slot is None
            if slot is None:
                slot = self._take_slot()
                if slot is None:
                    return None
                self._slots[adapter] = slot
                self._writes += 1
            else:
                self._hits += 1
            self._holds[adapter] = self._holds.get(adapter, 0) + 1
            return slot, must_write

    def release(self, adapter: Adapter) -> None:
        """Ends one `acquire`. The weights stay in the slot while the adapter is registered and nobody else needs it."""
        with self._lock:
            held = self._holds.get(adapter, 0)
            assert held > 0, f"adapter {adapter.name!r} (uid {adapter.uid}) is released more often than acquired"
            if held > 1:
                self._holds[adapter] = held - 1
                return
            del self._holds[adapter]
            self._slots.move_to_end(adapter)
            if self._registry.get(adapter.name) is not adapter:
                self._vacate(adapter)

    def slot_of(self, adapter: Adapter) -> int | None:
        """The slot that holds the adapter's weights, None: none does."""
        with self._lock:
            return self._slots.get(adapter)

    def forget_slots(self, *, even_held: bool = False) -> None:
        """Says that the slots' contents are lost (a failed write or step): all must be written again. None is held;
        even_held: any holds end, without a release."""
        with self._lock:
            if even_held:
                self._holds.clear()
            assert not self._holds, f"slots are held by {[a.name for a in self._holds]}"
            self._slots.clear()
            self._free = list(range(self.max_loras))

    def stats(self) -> SlotStats:
        """Counts for metrics."""
        with self._lock:
            sizes = len(self._registry), len(self._slots), len(self._holds)
            return SlotStats(*sizes, self._hits, self._writes, self._evictions)

    def check_integrity(self) -> None:
        """Asserts that every slot has one owner and that no unloaded adapter keeps an idle one."""
        with self._lock:
            slots = sorted([*self._free, *self._slots.values()])
            assert slots == list(range(self.max_loras)), f"free {self._free}, owned {list(self._slots.values())}"
            assert self._holds.keys() <= self._slots.keys(), "an adapter is held without a slot"
            assert all(count > 0 for count in self._holds.values()), f"counts of holds: {list(self._holds.values())}"
            assert len(self._registry) <= self.max_cpu_loras, (
                f"{len(self._registry)} adapters, max {self.max_cpu_loras}"
            )
            assert self._pinned <= self._registry.keys(), (
                f"pinned but not loaded: {self._pinned - self._registry.keys()}"
            )
            assert len(self._pinned) < self.max_loras or not self._pinned, f"all slots are pinned: {self._pinned}"
            assert all(name == a.name for name, a in self._registry.items()), (
                "an adapter is registered under another name"
            )
            idle = [a for a in self._slots if a not in self._holds and self._registry.get(a.name) is not a]
            assert not idle, f"unloaded adapters keep idle slots: {[a.name for a in idle]}"

    def _take_slot(self) -> int | None:
        if self._free:
            self._free.sort()
            return self._free.pop(0)
        victim = next((a for a in self._slots if a not in self._holds and a.name not in self._pinned), None)
        if victim is None:
            return None
        self._evictions += 1
        return self._slots.pop(victim)

    def _vacate(self, adapter: Adapter) -> None:
        """Frees the slot of an adapter that is not registered any more, unless requests still run with it."""
        if adapter in self._slots and adapter not in self._holds:
            self._free.append(self._slots.pop(adapter))
