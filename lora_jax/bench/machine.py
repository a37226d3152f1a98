"""Where a result was measured: without it, a number says nothing."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from typing import Any

import jax

from .. import __version__


def describe() -> dict[str, Any]:
    """Device, versions, date, as plain data."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "versions": {"lora-jax": __version__, "python": platform.python_version(), **versions},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
