"""Where the engine runs: the device, its mesh, which implementation of the kernels it supports, how much memory there is."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lora_jax.kernels import MIN_COMPUTE_CAPABILITY

from .compile_cache import autotune_folder
from .errors import ConfigError
from .log import log

# Thunk kinds that go into a CUDA graph: all that a step can hold, loops and branches included.
COMMAND_BUFFER_KINDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"


@dataclass(frozen=True)
class DeviceSetup:
    """The chosen device as a mesh of one with axis "tp", and what follows from it."""

    device: Any
    mesh: Mesh
    sharding: NamedSharding
    implementation: str  # of all kernels: "triton" or "xla"

    @property
    def is_gpu(self) -> bool:
        return self.device.platform == "gpu"


def _nvidia_card() -> bool:
    return Path("/proc/driver/nvidia/gpus").is_dir() or shutil.which("nvidia-smi") is not None


def _cpu_by_choice() -> bool:
    """Whether the user told JAX itself to leave GPUs alone."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return bool(platforms) and not {"cuda", "gpu", "rocm"} & set(platforms.split(","))


def _pick(device: str) -> Any:
    if device == "auto" and _cpu_by_choice():
        device = "cpu"
    if device != "cpu":
        try:
            return jax.devices("gpu")[0]
        except RuntimeError as e:
            if device == "gpu" or _nvidia_card():
                why = "an NVIDIA card is present, but" if _nvidia_card() else "device=gpu was asked for, but"
                raise ConfigError(
                    f"{why} JAX cannot use it ({str(e).splitlines()[0]}). Install the CUDA plugin: "
                    "pip install 'lora-jax[cuda13]' (driver 580 or newer) or 'lora-jax[cuda12]' (driver 525 or newer), "
                    "unset JAX_PLATFORMS=cpu; or choose device=cpu"
                ) from e
    return jax.devices("cpu")[0]


def _implementation(wanted: str, device: Any) -> str:
    if device.platform != "gpu":
        if wanted == "triton":
            raise ConfigError("implementation=triton needs an NVIDIA GPU; on CPU use implementation=xla or auto")
        if wanted == "auto":
            log.info("kernels: implementation=xla (no GPU)")
        return "xla"
    capability = tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split("."))
    if capability >= MIN_COMPUTE_CAPABILITY:
        return "xla" if wanted == "xla" else "triton"
    needed = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
    found = f"{device.device_kind} has compute capability {'.'.join(map(str, capability))}, below {needed}"
    if wanted == "triton":
        raise ConfigError(f"implementation=triton: {found}; use implementation=xla")
    if wanted == "auto":
        log.warning("THE KERNELS ARE NOT USED: %s; falling back to implementation=xla, which is slower", found)
    return "xla"


def set_up_device(device: str, implementation: str, gpu_memory_utilization: float) -> DeviceSetup:
    """Raises ConfigError when the wanted device or implementation is not to be had."""
    # Read by JAX when its GPU client starts; without it the client takes 75 % of the card, with both names it does not start.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", f"{gpu_memory_utilization:.3f}")
    chosen = _pick(device)
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,), devices=[chosen])
    return DeviceSetup(chosen, mesh, NamedSharding(mesh, PartitionSpec()), _implementation(implementation, chosen))


def free_memory(setup: DeviceSetup, utilization: float) -> int:
    """Bytes that the engine may still take."""
    if setup.is_gpu:
        stats = setup.device.memory_stats() or {}
        return int(stats.get("bytes_limit", 0)) - int(stats.get("bytes_in_use", 0))
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * utilization)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * utilization)


def compiler_options(setup: DeviceSetup, command_buffers: bool, cache: str | None) -> dict[str, object]:
    """Per-executable XLA options of a step. Autotuning results are kept, so that the plain and the LoRA executable of a
    bucket, and two starts, use the same GEMM configurations."""
    if not setup.is_gpu:
        return {}
    options: dict[str, object] = {"xla_gpu_enable_command_buffer": COMMAND_BUFFER_KINDS if command_buffers else ""}
    if command_buffers:
        options["xla_gpu_graph_min_graph_size"] = 1
    if cache and (folder := autotune_folder(cache, setup.device.device_kind)):
        options["xla_gpu_per_fusion_autotune_cache_dir"] = folder
    return options
