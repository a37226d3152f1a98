"""What executables take on the device, for `bench overhead`: from the driver, and from the executables themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lora_jax.bench import footprint
from lora_jax.bench.driver import DriverError, DriverState


def test_memory_is_the_drivers_less_the_pool(monkeypatch):
    used = iter([1000, 1900])
    monkeypatch.setattr(footprint, "read_driver", lambda ordinal: DriverState(next(used), 9999, "580"))
    card = lambda pool: SimpleNamespace(platform="gpu", local_hardware_id=0, memory_stats=lambda: pool)  # noqa: E731
    before = footprint.read_footprint(card({"pool_bytes": 400}))
    after = footprint.read_footprint(card({"pool_bytes": 1000}))
    assert footprint.grown(before, after) == 300

    def fail(ordinal):
        raise DriverError("nvmlInit_v2 failed with code 9")

    monkeypatch.setattr(footprint, "read_driver", fail)
    for stats, words in (({"pool_bytes": 4}, "code 9"), ({}, "pool_bytes"), (None, "pool_bytes")):
        unknown = footprint.read_footprint(card(stats))
        assert unknown.outside_pool is None and words in (unknown.reason or "")
        assert footprint.grown(before, unknown) is None
    cpu = footprint.read_footprint(SimpleNamespace(platform="cpu"))
    assert cpu == footprint.Reading(None, footprint.ON_CPU)


def test_sizes_of_a_table():
    sizes = {"a": (100, 7), "b": (50, 9)}
    analysis: dict[str, Any] = {
        key: SimpleNamespace(generated_code_size_in_bytes=code, temp_size_in_bytes=temp)
        for key, (code, temp) in sizes.items()
    }
    table = SimpleNamespace(
        keys=lambda: list(sizes), compiled=lambda key: SimpleNamespace(memory_analysis=lambda: analysis[key])
    )
    assert footprint.table_sizes(table) == {"executables": 2, "code_bytes": 150, "largest_temp_bytes": 9}
    analysis["b"] = None
    assert footprint.table_sizes(table) == {"executables": 2, "code_bytes": None, "largest_temp_bytes": None}
