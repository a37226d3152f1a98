"""What the machine itself can do, measured where a result is: how fast memory can be read."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

GPU_BYTES, CPU_BYTES = 4 << 30, 256 << 20  # far above any cache
TRIALS, CALLS = 5, 4


@dataclass(frozen=True)
class Bandwidth:
    """bytes_per_second: None where it was not measured, with the reason. buffer_bytes: what was read each time."""

    bytes_per_second: float | None
    buffer_bytes: int
    reason: str | None = None

    def share(self, bytes_per_second: float | None) -> float | None:
        """What part of it a rate is; None where either is unknown."""
        if bytes_per_second is None or self.bytes_per_second is None:
            return None
        return bytes_per_second / self.bytes_per_second

    def as_dict(self, achieved: float | None = None) -> dict[str, Any]:
        """For the JSON line, with the share that `achieved` bytes a second are."""
        return asdict(self) | {"share": self.share(achieved)}


def read_bandwidth(device: Any, size: int | None = None) -> Bandwidth:
    """The best of several passes over one buffer of `size` bytes, a multiple of 1 MiB (default: 4 GiB on a GPU, 256 MiB on a
    CPU), as sums of long rows, of short rows, and as a matrix-vector product: XLA makes different loops of them, and which one
    is the fastest depends on the machine.

    Where the memory is not free, says so instead of measuring. Compiles: read the counter of compilations before.
    """
    size = size or (GPU_BYTES if device.platform == "gpu" else CPU_BYTES)
    free, needed = _free(device), size + size // 8
    if free is not None and free < needed:
        return Bandwidth(None, size, f"{needed:,} bytes of free device memory are needed, {free:,} are there")
    rows = 4096  # side by side: enough for any card
    columns = size // rows // 4
    with jax.default_device(device):
        data = jax.jit(lambda: jnp.ones((rows, columns), jnp.float32))()
        vector = jnp.ones((columns,), jnp.float32)
        forms = (
            lambda x, v: jnp.sum(x, axis=1),
            lambda x, v: jnp.sum(x.reshape(64 * rows, -1), axis=1),
            lambda x, v: x @ v,
        )
        best = min(_seconds(jax.jit(form), data, vector) for form in forms)
    return Bandwidth(data.nbytes / best, data.nbytes)


def _seconds(form: Any, *args: Any) -> float:
    """Of one call, the least of several trials."""
    jax.block_until_ready(form(*args))
    trials = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        jax.block_until_ready([form(*args) for _ in range(CALLS)])  # in a row: starting one hides behind the one before
        trials.append((time.perf_counter() - begin) / CALLS)
    return min(trials)


def _free(device: Any) -> int | None:
    """Bytes; None where nobody knows."""
    if device.platform == "gpu":
        stats = device.memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
