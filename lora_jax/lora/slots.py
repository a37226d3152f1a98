"""Which adapters are loaded, and which of them lie in a device slot. Host only: never imports jax.

Two tiers. The registry holds up to `max_cpu_loras` adapters in host memory by name. Up to `max_loras` adapters lie in
device slots; a slot is held while requests run with its adapter, and keeps its weights afterwards until another adapter
needs it. Requests hold adapter objects, not names: unloading or replacing a name never changes a request that runs.
A slot takes as many places of the device stacks as its adapter's rank needs, so memory follows ranks.
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

    def __init__(
        self, max_loras: int, max_cpu_loras: int, *, num_places: int | None = None, place_rank: int = 1, most: int = 1
    ):
        """max_loras: device slots. max_cpu_loras: adapters that may be registered at once, >= max_loras. num_places: of the device
        stacks, of place_rank ranks each, of which an adapter takes `most` at most; None: each slot has a place of its own."""
        assert 1 <= max_loras <= max_cpu_loras, f"max_loras={max_loras}, max_cpu_loras={max_cpu_loras}"
        self.max_loras = max_loras
        self.max_cpu_loras = max_cpu_loras
        self._lock = threading.RLock()
        self._registry: dict[str, Adapter] = {}
        self._pinned: set[str] = set()
        self._slots: OrderedDict[Adapter, int] = OrderedDict()  # of the idle ones, least recently released first
        self._holds: dict[Adapter, int] = {}  # acquires without their release
        self._free = list(range(max_loras))
        self._num_places, self._place_rank, self._most = num_places, place_rank, most
        assert num_places is None or num_places >= most, f"{num_places} places, an adapter takes up to {most}"
        self._places: dict[Adapter, tuple[int, ...]] = {}  # of the adapters in slots
        self._free_places = list(range(num_places or 0))
        self._hits = self._writes = self._evictions = 0

    # -- the registry --

    def register(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Makes an adapter available under its name. With replace, requests that run keep the adapter they have.

        Raises: AdapterError when the name is taken; AdapterCapacityError when max_cpu_loras adapters are registered.
        """
        with self._lock:
            old = self._registry.get(adapter.name)
            if old is not None and replace and adapter.name in self._pinned:
                self._check_pins(adapter, "replace")
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
            self._check_pins(self._registry[name], "pin")
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
        None: every slot, or too many places, are held by running requests or pinned; ask again after a release.
        """
        with self._lock:
            slot = self._slots.get(adapter)
            must_write = slot is None
            if slot is None:
                victims = self._victims(self._needs(adapter))
                if victims is None:
                    return None
                for victim in victims:
                    self._evictions += 1
                    self._give_back(victim)
                self._free.sort()
                slot = self._slots[adapter] = self._free.pop(0)
                self._take_places(adapter, slot)
                self._writes += 1
            else:
                self._hits += 1
            self._holds[adapter] = self._holds.get(adapter, 0) + 1
            return slot, must_write

    def available(self, adapter: Adapter) -> bool:
        """Whether `acquire` would give a slot."""
        with self._lock:
            return adapter in self._slots or self._victims(self._needs(adapter)) is not None

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

    def keeps(self, adapter: Adapter) -> bool:
        """Whether nobody else can get the slot that the adapter has: it is held or pinned."""
        with self._lock:
            return adapter in self._holds or (adapter in self._slots and adapter.name in self._pinned)

    def places_of(self, adapter: Adapter) -> tuple[int, ...]:
        """Where in the device stacks the ranks of an adapter in a slot lie."""
        with self._lock:
            return self._places[adapter]

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
            self._places.clear()
            self._free, self._free_places = list(range(self.max_loras)), list(range(self._num_places or 0))

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
            assert self._places.keys() == self._slots.keys(), "an adapter has a slot or places, and not both"
            if self._num_places is not None:
                places = sorted([*self._free_places, *(p for own in self._places.values() for p in own)])
                assert places == list(range(self._num_places)), (
                    f"free {self._free_places}, owned {self._places.values()}"
                )
                assert all(len(own) == self._needs(a) for a, own in self._places.items()), "too few or too many places"
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

    def _needs(self, adapter: Adapter) -> int:
        """Places."""
        return 1 if self._num_places is None else -(-adapter.rank // self._place_rank)

    def _victims(self, places: int) -> list[Adapter] | None:
        """Idle adapters to evict, those least recently released first, so that a slot and so many places are free. None: there are
        not enough."""

        def enough(free: int, free_places: int) -> bool:
            return free > 0 and (self._num_places is None or free_places >= places)

        idle = [a for a in self._slots if a not in self._holds and a.name not in self._pinned]
        free, free_places, victims = len(self._free), len(self._free_places), []
        while not enough(free, free_places) and len(victims) < len(idle):
            victims.append(idle[len(victims)])
            free, free_places = free + 1, free_places + len(self._places[victims[-1]])
        return victims if enough(free, free_places) else None

    def _take_places(self, adapter: Adapter, slot: int) -> None:
        if self._num_places is None:
            self._places[adapter] = (slot,)
            return
        self._free_places.sort()
        needed = self._needs(adapter)
        self._places[adapter], self._free_places = tuple(self._free_places[:needed]), self._free_places[needed:]

    def _give_back(self, adapter: Adapter) -> None:
        self._free.append(self._slots.pop(adapter))
        places = self._places.pop(adapter)
        if self._num_places is not None:
            self._free_places += places

    def _check_pins(self, adapter: Adapter, what: str) -> None:
        """That with this adapter pinned under its name any other still finds places."""
        if self._num_places is None:
            return
        pinned = sum(self._needs(self._registry[name]) for name in self._pinned - {adapter.name})
        left = self._num_places - pinned - self._needs(adapter)
        if left < self._most:
            raise AdapterCapacityError(
                f"cannot {what} adapter {adapter.name!r}: of {self._num_places * self._place_rank} ranks in slots "
                f"{self._most * self._place_rank} must stay free for others; pinned: {', '.join(sorted(self._pinned)) or 'none'}"
            )

    def _vacate(self, adapter: Adapter) -> None:
        """Frees the slot of an adapter that is not registered any more, unless requests still run with it."""
        if adapter in self._slots and adapter not in self._holds:
            self._give_back(adapter)
