"""What a decode step is told of adapters stays on the device while it stays the same, and no longer."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lora_jax.runtime import Runtime
from lora_jax.step_keys import StepKey

ROWS = [SimpleNamespace(num_tokens=1, request=SimpleNamespace(slot=slot)) for slot in (0, -1, 1)]
KEY = StepKey("decode", 4, True)


class Slots:
    """Of a `SlotRanks`: what it says of rows, new arrays each time."""

    def __init__(self):
        self.at_ends, self.listed = [-1, -1, -1, -1], 7

    def end_slots(self, slot_ids: np.ndarray) -> np.ndarray:
        return np.array(self.at_ends, np.int32)

    def items(self, slot_ids: np.ndarray, requests: int, room: int) -> np.ndarray:
        return np.full((4, 8), self.listed, np.int32)


@pytest.fixture
def runtime() -> Runtime:
    """A runtime that makes what steps are given, and has nothing to run them with."""
    builder = SimpleNamespace(
        slot_ids=lambda rows, bucket: np.array([*(row.request.slot for row in rows), -1], np.int32)[:bucket],
        most_requests=lambda key: key.bucket,
    )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    made = Runtime.__new__(Runtime)
    made.spec = SimpleNamespace(builder=builder, setup=SimpleNamespace(sharding=sharding), lora=True)
    made.table = {StepKey("init_slots", 1, lora=True): lambda: (), StepKey("init", 1): lambda: (None, None, None)}
    made._params, made._slot_ranks, made._on_device = (), Slots(), {}
    made._make_state()
    return made


def given(runtime: Runtime, rows=ROWS, key: StepKey = KEY) -> tuple:
    return runtime._lora_args(key, rows)[1]


def test_nothing_is_copied_while_nothing_changes(runtime):
    first = given(runtime)
    assert [np.asarray(array).tolist() for array in first] == [[0, -1, 1, -1], [-1] * 4, [[7] * 8] * 4]
    assert all(isinstance(array, jax.Array) for array in first)
    assert all(a is b for a, b in zip(first, given(runtime), strict=True))
    other = given(runtime, key=StepKey("decode", 4, True, items=8))  # a step of its own
    assert all(a is b for a, b in zip(first, given(runtime), strict=True)) and other is not first


@pytest.mark.parametrize("change", ["rows", "at_ends", "listed"])
def test_each_change_is_seen(runtime, change):
    """Also one back to what was, and of one array alone."""
    values = {"rows": (ROWS, ROWS[::-1]), "at_ends": ([-1] * 4, [0, -1, -1, -1]), "listed": (7, 8)}[change]
    seen = []
    for i in (0, 1, 0, 1):
        rows = values[i] if change == "rows" else ROWS
        if change != "rows":
            setattr(runtime._slot_ranks, change, values[i])
        want = runtime.spec.builder.slot_ids(rows, 4), np.array(runtime._slot_ranks.at_ends), runtime._slot_ranks.listed
        got = given(runtime, rows)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.broadcast_to(b, a.shape))
        seen.append(got)
    assert all(a[0] is not b[0] for a, b in zip(seen, seen[1:], strict=False))


def test_state_that_is_made_anew_forgets_them(runtime):
    """After a failure on the device its arrays may be gone."""
    before = given(runtime)
    runtime._make_state()
    assert all(a is not b for a, b in zip(before, given(runtime), strict=True))


def test_tokens_of_a_prefill_are_not_kept(runtime):
    """They are others in every step."""
    steps = count()
    runtime.spec.builder.slot_ids = lambda rows, bucket: np.full(bucket, next(steps), np.int32)
    for i in range(3):
        slots, *_ = given(runtime, key=StepKey("prefill", 32, True))
        assert isinstance(slots, np.ndarray) and slots[0] == i
    assert runtime._on_device == {}
