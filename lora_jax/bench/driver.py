"""What NVIDIA's driver says of a card: memory in use by everything on it, and the driver's version.

JAX's own counters know the arrays it allocates, not what executables take: their code and their CUDA graphs live outside its
pool. So this asks the driver itself, through NVML, for the card that JAX uses.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


class DriverError(Exception):
    """The driver cannot be asked; the message says why."""


@dataclass(frozen=True)
class DriverState:
    """Bytes in use on the card, by all processes, and in all; the driver's version."""

    used: int
    total: int
    version: str


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def read_driver(ordinal: int) -> DriverState:
    """ordinal: the device as CUDA counts it in this process (jax: device.local_hardware_id). Raises: DriverError."""
    cuda, nvml = _library("libcuda.so.1"), _library("libnvidia-ml.so.1")
    # NVML counts all cards of the machine, CUDA those that the process may see: the PCI address is the same for both.
    address = ctypes.create_string_buffer(32)
    number = ctypes.c_int()
    _check(cuda, "cuInit", ctypes.c_uint(0))
    _check(cuda, "cuDeviceGet", ctypes.byref(number), ctypes.c_int(ordinal))
    _check(cuda, "cuDeviceGetPCIBusId", address, ctypes.c_int(len(address)), number)
    _check(nvml, "nvmlInit_v2")
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        version = ctypes.create_string_buffer(96)
        _check(nvml, "nvmlDeviceGetHandleByPciBusId_v2", address, ctypes.byref(handle))
        _check(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        _check(nvml, "nvmlSystemGetDriverVersion", version, ctypes.c_uint(len(version)))
    finally:
        nvml.nvmlShutdown()
    return DriverState(used=memory.used, total=memory.total, version=version.value.decode())


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as e:
        raise DriverError(f"{name} cannot be loaded: {e}") from None


def _check(library: Any, function: str, *args: Any) -> None:
    code = getattr(library, function)(*args)
    if code != 0:
        raise DriverError(f"{function} failed with code {code}")
