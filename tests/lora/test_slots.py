"""SlotManager against a slow simulation that keeps plain lists, and its rules one by one."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.errors import AdapterCapacityError, AdapterError, AdapterNotFoundError
from lora_jax.lora.adapter import Adapter, LoadReport
from lora_jax.lora.slots import SlotManager

_uid = iter(range(1, 10**9))


def make(name: str) -> Adapter:
    report = LoadReport(name, "", "", 1, {}, {}, (), (), (), 0, ())
    return Adapter(next(_uid), name, "", "", 1, {}, report)


class Simulation:
    """What should happen, from the history alone: `slots[i]` is an adapter or None, `touched` when it was last used."""

    def __init__(self, max_loras: int, max_cpu_loras: int):
        self.slots: list[Adapter | None] = [None] * max_loras
        self.touched: dict[Adapter, int] = {}
        self.max_cpu_loras = max_cpu_loras
        self.registered: dict[str, Adapter] = {}
        self.pinned: list[str] = []
        self.running: list[Adapter] = []  # one entry for each acquire without release
        self.clock = 0

    def tidy(self) -> None:
        for i, adapter in enumerate(self.slots):
            if adapter is not None and adapter not in self.running and adapter not in self.registered.values():
                self.slots[i] = None

    def register(self, adapter: Adapter, replace: bool) -> type[Exception] | None:
        if adapter.name in self.registered and not replace:
            return AdapterError
        if adapter.name not in self.registered and len(self.registered) == self.max_cpu_loras:
            return AdapterCapacityError
        self.registered[adapter.name] = adapter
        self.tidy()
        return None

    def unregister(self, name: str) -> type[Exception] | None:
        if name not in self.registered:
            return AdapterNotFoundError
        del self.registered[name]
        self.pinned = [p for p in self.pinned if p != name]
        self.tidy()
        return None

    def pin(self, name: str) -> type[Exception] | None:
        if name not in self.registered:
            return AdapterNotFoundError
        if len({*self.pinned, name}) > len(self.slots) - 1:
            return AdapterCapacityError
        self.pinned.append(name)
        return None

    def acquire(self, adapter: Adapter) -> tuple[int, bool] | None:
        self.clock += 1
        must_write = adapter not in self.slots
        if must_write:
            slot = self.choose()
            if slot is None:
                return None
            self.slots[slot] = adapter
        self.running.append(adapter)
        self.touched[adapter] = self.clock
        return self.slots.index(adapter), must_write

    def choose(self) -> int | None:
        for i, owner in enumerate(self.slots):
            if owner is None:
                return i
        idle = [
            (self.touched[o], i)
            for i, o in enumerate(self.slots)
            if o and o not in self.running and o.name not in self.pinned
        ]
        return min(idle)[1] if idle else None

    def release(self, adapter: Adapter) -> None:
        self.clock += 1
        self.running.remove(adapter)
        if adapter not in self.running:
            self.touched[adapter] = self.clock
        self.tidy()


NAMES = ["a", "b", "c", "d", "e"]
KINDS = {"acquire": 40, "release": 38, "register": 8, "unregister": 6, "pin": 4, "unpin": 4}


def operations(seed: int, count: int = 120) -> list[tuple[str, str, int, bool]]:
    """(kind, name, index, flag). From a seed: lists drawn by hypothesis stay short and rarely reach an eviction."""
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=count)
    return [(kind, rng.choice(NAMES), rng.randrange(100), rng.random() < 0.3) for kind in kinds]


def outcome(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except (AdapterError, AdapterCapacityError, AdapterNotFoundError) as e:
        return type(e)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_against_a_simulation(max_loras: int, extra: int, seed: int) -> None:
    slots, sim = SlotManager(max_loras, max_loras + extra), Simulation(max_loras, max_loras + extra)
    seen: list[Adapter] = []
    for op, name, index, flag in operations(seed):
        if op == "register":
            adapter = make(name)
            want = sim.register(adapter, flag)
            assert outcome(slots.register, adapter, replace=flag) is want
            seen += [] if want else [adapter]
        elif op == "unregister":
            was = sim.registered.get(name)
            assert outcome(slots.unregister, name) is (sim.unregister(name) or was)
        elif op == "pin":
            assert outcome(slots.pin, name) is sim.pin(name)
        elif op == "unpin":
            want = None if name in sim.registered else AdapterNotFoundError
            sim.pinned = [p for p in sim.pinned if p != name]
            assert outcome(slots.unpin, name) is want
        elif op == "acquire" and seen:
            # flag: any adapter ever seen, so that a preempted request of an unloaded adapter runs on
            pool = seen if flag else list(sim.registered.values()) or seen
            adapter = pool[index % len(pool)]
            assert slots.acquire(adapter) == sim.acquire(adapter)
        elif op == "release" and sim.running:
            adapter = sim.running[index % len(sim.running)]
            slots.release(adapter)
            sim.release(adapter)
        slots.check_integrity()
        for adapter in seen:
            want = sim.slots.index(adapter) if adapter in sim.slots else None
            assert slots.slot_of(adapter) == want
        assert slots.adapters() == list(sim.registered.values())
        for adapter in set(sim.running):
            assert slots.slot_of(adapter) is not None, "a running request lost its slot"


def filled(*names: str, max_loras: int = 2) -> tuple[SlotManager, list[Adapter]]:
    slots, adapters = SlotManager(max_loras, 4), [make(n) for n in names]
    for adapter in adapters:
        slots.register(adapter)
    return slots, adapters


def test_least_recently_used_idle_slot_goes_first() -> None:
    slots, (a, b, c) = filled("a", "b", "c")
    assert slots.acquire(a) == (0, True)
    assert slots.acquire(b) == (1, True)
    assert slots.acquire(c) is None  # both run
    slots.release(b)
    slots.release(a)
    assert slots.acquire(a) == (0, False)
    slots.release(a)
    assert slots.acquire(c) == (1, True)
    assert slots.slot_of(b) is None
    stats = slots.stats()
    assert (stats.registered, stats.resident, stats.held) == (3, 2, 1)
    assert (stats.hits, stats.writes, stats.evictions) == (1, 3, 1)


def test_unloading_leaves_running_requests_alone() -> None:
    slots, (a, b) = filled("a", "b")
    assert slots.acquire(a) == (0, True) == (slots.slot_of(a), True)
    assert slots.acquire(a) == (0, False)
    assert slots.unregister("a") is a
    with pytest.raises(AdapterNotFoundError, match="no adapter named 'a' is loaded; loaded: b"):
        slots.get("a")
    slots.release(a)
    assert slots.slot_of(a) == 0
    slots.release(a)
    assert slots.slot_of(a) is None


def test_replacing_keeps_the_old_object_for_its_requests() -> None:
    slots, (old,) = filled("a")
    slots.acquire(old)
    new = make("a")
    with pytest.raises(AdapterError, match="'a' is loaded already"):
        slots.register(new)
    slots.register(new, replace=True)
    assert slots.get("a") is new and slots.acquire(new) == (1, True) and slots.slot_of(old) == 0
    slots.release(old)
    assert slots.slot_of(old) is None and slots.slot_of(new) == 1


def test_a_full_registry_says_what_to_unload() -> None:
    slots, _ = filled("a", "b", "c", "d")
    with pytest.raises(AdapterCapacityError, match="max_cpu_loras=4.*unload one of a, b, c, d"):
        slots.register(make("e"))
    slots.register(make("d"), replace=True)
    slots.unregister("a")
    slots.register(make("e"))


def test_pins() -> None:
    slots, (a, b, c) = filled("a", "b", "c")
    slots.pin("a")
    slots.pin("a")
    with pytest.raises(AdapterCapacityError, match="cannot pin adapter 'b'.*pinned: a"):
        slots.pin("b")
    slots.acquire(a)
    slots.release(a)
    for adapter in (b, c):
        assert slots.acquire(adapter) == (1, True)
        slots.release(adapter)
    assert slots.slot_of(a) == 0
    slots.unpin("a")
    slots.acquire(b)
    assert slots.slot_of(a) is None
    with pytest.raises(AdapterNotFoundError):
        slots.pin("z")
    slots.pin("c")
    slots.unregister("c")
    slots.register(make("c"))
    slots.pin("b")  # the pin went with the old c


def test_releases_are_counted() -> None:
    slots, (a,) = filled("a")
    with pytest.raises(AssertionError, match="released more often"):
        slots.release(a)
    slots.acquire(a)
    slots.release(a)
    with pytest.raises(AssertionError, match="released more often"):
        slots.release(a)


def test_lost_contents_are_written_again() -> None:
    slots, (a,) = filled("a")
    slots.acquire(a)
    with pytest.raises(AssertionError, match="held"):
        slots.forget_slots()
    slots.release(a)
    slots.forget_slots()
    assert slots.acquire(a) == (0, True)


# ---- places ----------------------------------------------------------------------------------------------------------
def of_rank(name: str, rank: int) -> Adapter:
    return dataclasses.replace(make(name), rank=rank)


def with_places(ranks: int, max_loras: int = 3) -> SlotManager:
    """Slots of up to 64 ranks, places of 16, in all for so many ranks."""
    return SlotManager(max_loras, 8, num_places=ranks // 16, place_rank=16, most=4)


def test_a_slot_takes_the_places_that_its_rank_needs():
    slots = with_places(96)
    small, large, other = of_rank("s", 17), of_rank("l", 64), of_rank("o", 16)
    for adapter in (small, large, other):
        slots.register(adapter)
    assert slots.acquire(small) == (0, True) and slots.places_of(small) == (0, 1)
    assert slots.acquire(large) == (1, True) and slots.places_of(large) == (2, 3, 4, 5)
    assert slots.acquire(other) is None, "a slot is free, a place is not"
    slots.release(small)
    assert slots.acquire(other) == (0, True) and slots.places_of(other) == (0,)
    assert slots.slot_of(small) is None and slots.stats().evictions == 1
    slots.check_integrity()


def test_as_many_are_evicted_as_make_room_or_none():
    slots = with_places(80, max_loras=4)
    idle, held, large = [of_rank(n, 16) for n in "abc"], of_rank("h", 32), of_rank("l", 64)
    for adapter in (*idle, held, large):
        slots.register(adapter)
    for adapter in idle:
        slots.acquire(adapter)
        slots.release(adapter)
    slots.acquire(held)
    assert slots.acquire(large) is None and all(slots.slot_of(a) is not None for a in idle), "evicted for nothing"
    slots.release(held)
    assert slots.acquire(large) == (0, True) and slots.places_of(large) == (0, 1, 2, 3)
    assert [slots.slot_of(a) for a in (*idle, held)] == [None, None, None, None]
    slots.check_integrity()


def test_pins_leave_places_for_the_largest_adapter():
    slots = with_places(96)
    for name, rank in (("s", 16), ("m", 32), ("l", 64)):
        slots.register(of_rank(name, rank))
    slots.pin("s")
    with pytest.raises(AdapterCapacityError, match="cannot pin adapter 'm': of 96 ranks in slots 64 must stay free"):
        slots.pin("m")
    with pytest.raises(AdapterCapacityError, match="cannot replace adapter 's'"):
        slots.register(of_rank("s", 48), replace=True)
    slots.register(of_rank("s", 32), replace=True)
    slots.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 12), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_places_under_any_traffic(num_places: int, max_loras: int, seed: int) -> None:
    """No place has two owners; an adapter is refused only where those that run or are pinned leave too little."""
    rng = random.Random(seed)
    slots = SlotManager(max_loras, max_loras + 8, num_places=num_places, place_rank=16, most=4)
    adapters = [of_rank(str(i), rng.randint(1, 64)) for i in range(max_loras + 8)]
    running: list[Adapter] = []
    needs = lambda a: -(-a.rank // 16)  # noqa: E731
    for adapter in adapters:
        slots.register(adapter)
    for _ in range(150):
        adapter = rng.choice(adapters)
        kept = set(running) | {a for a in adapters if a.name in slots._pinned and slots.slot_of(a) is not None}
        if rng.random() < 0.1:
            pinned = adapter.name in slots._pinned
            outcome(slots.unpin if pinned else slots.pin, adapter.name)
        elif running and rng.random() < 0.5:
            slots.release(running.pop(rng.randrange(len(running))))
        else:
            fits = len(kept) < max_loras and sum(map(needs, kept)) + needs(adapter) <= num_places
            got = slots.acquire(adapter)
            assert (got is not None) == (fits or adapter in kept or slots.slot_of(adapter) is not None)
            if got is not None:
                assert len(slots.places_of(adapter)) == needs(adapter)
                running.append(adapter)
        slots.check_integrity()
        assert all(slots.slot_of(a) is not None for a in running)
