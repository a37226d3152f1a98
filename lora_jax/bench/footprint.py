"""What a set of executables takes on the device: by the driver's count, and by the compiler's own."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from .driver import DriverError, read_driver

ON_CPU = "on a CPU executables lie in host memory beside everything else; no driver counts them"


@dataclass(frozen=True)
class Reading:
    """outside_pool: bytes that the driver counts as used, less those of JAX's own pool of arrays; None with the reason."""

    outside_pool: int | None
    reason: str | None = None


def read_footprint(device: Any) -> Reading:
    """The driver's count is of the whole card: other processes there must hold still between two readings."""
    if device.platform != "gpu":
        return Reading(None, ON_CPU)
    gc.collect()
    stats = device.memory_stats() or {}
    pool = stats.get("pool_bytes")
    if pool is None:
        return Reading(None, "JAX does not tell the size of its pool (device.memory_stats() has no pool_bytes)")
    try:
        return Reading(read_driver(device.local_hardware_id).used - pool)
    except DriverError as e:
        return Reading(None, str(e))


def grown(before: Reading, after: Reading) -> int | None:
    """Bytes between two readings; None where one of them is missing."""
    if before.outside_pool is None or after.outside_pool is None:
        return None
    return after.outside_pool - before.outside_pool


def table_sizes(table: Any) -> dict[str, int | None]:
    """Of a StepTable, by the compiler's own account: number of executables, bytes of code in all, of the largest temporaries.
    None where the backend gives no account; a CPU's calls every code 0 bytes long."""
    sizes = [table.compiled(key).memory_analysis() for key in table.keys()]
    if any(size is None for size in sizes):
        return {"executables": len(sizes), "code_bytes": None, "largest_temp_bytes": None}
    return {
        "executables": len(sizes),
        "code_bytes": sum(int(size.generated_code_size_in_bytes) for size in sizes) or None,
        "largest_temp_bytes": max((int(size.temp_size_in_bytes) for size in sizes), default=0),
    }
