"""What stands beside every result: machine, versions, command, date. Without it a number says nothing.

`describe` never imports jax: a benchmark that only talks to a server uses it too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
from pathlib import Path
from typing import Any

from .. import __version__

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """command: as typed, from options.argv where the command line left it; versions; date: UTC, ISO 8601."""
    argv = getattr(options, "argv", None)
    return {
        "command": None if argv is None else shlex.join(["lora-jax", *argv]),
        "versions": {"lora-jax": __version__, "python": platform.python_version(), **_versions()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # measuring a server elsewhere needs none of them
            continue
    return found


def host() -> dict[str, Any]:
    """The machine without its accelerators. cores: those this process may use; memory_bytes: None where unknown."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu_model(), "cores": cores, "memory_bytes": _host_memory()}


def hardware(device: Any) -> dict[str, Any]:
    """Of a jax device, and its host. memory_bytes: of the card; driver, cuda: None on a CPU or where they cannot be read."""
    from jax.extend.backend import get_backend

    from .driver import DriverError, read_driver

    found: dict[str, Any] = {"device": device.device_kind, "platform": device.platform, "host": host()}
    if device.platform != "gpu":
        return found | {"memory_bytes": found["host"]["memory_bytes"], "driver": None, "cuda": None}
    try:
        state = read_driver(device.local_hardware_id)
    except DriverError as e:
        return found | {"memory_bytes": None, "driver": None, "driver_error": str(e), "cuda": _cuda(get_backend())}
    return found | {"memory_bytes": state.total, "driver": state.version, "cuda": _cuda(get_backend())}


def _cuda(backend: Any) -> str | None:
    """The CUDA runtime's version from the backend's own description, such as "PJRT C API\\ncuda 12090"."""
    match = re.search(r"\bcuda (\d+)", backend.platform_version)
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def one_line(result: dict[str, Any]) -> str:
    """Machine, versions and date of a result on one line, for the foot of a figure."""
    machine = result.get("hardware", {})
    parts = [machine.get("device") or machine.get("cpu")]
    if machine.get("platform") == "cpu":
        parts = [f"{machine['host']['cpu']}, {machine['host']['cores']} cores"]
    parts += [f"driver {machine['driver']}"] if machine.get("driver") else []
    parts += [f"CUDA {machine['cuda']}"] if machine.get("cuda") else []
    parts += [f"{name} {version}" for name, version in result["versions"].items() if name in ("lora-jax", "jax")]
    return ", ".join([*filter(None, parts), result["date"]])
