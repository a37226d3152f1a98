"""Where the engine runs: the device, its mesh, which LoRA implementation it supports, how much memory there is."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lora_jax.kernels import MIN_COMPUTE_CAPABILITY

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
    implementation: str  # of the LoRA ops: "triton" or "xla"

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
            log.info("LoRA implementation: xla (no GPU)")
        return "xla"
    capability = tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split("."))
    if capability >= MIN_COMPUTE_CAPABILITY:
        return "xla" if wanted == "xla" else "triton"
    needed = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
    found = f"{device.device_kind} has compute capability {'.'.join(map(str, capability))}, below {needed}"
    if wanted == "triton":
        raise ConfigError(f"implementation=triton: {found}; use implementation=xla")
    if wanted == "auto":
        log.warning("LoRA KERNELS ARE NOT USED: %s; falling back to implementation=xla, which is slower", found)
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


def use_compilation_cache(folder: str | None) -> str | None:
    """Point JAX's persistent compilation cache at `folder` (None: the user's cache folder, "": no cache); a cache that the
    process has configured already is left alone. Returns the folder in use."""
    if folder == "":
        return None
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if configured:
        return configured
    path = folder or _default_cache()
    if path is None:
        log.warning("no compilation cache: there is no home folder; name one with compilation_cache_dir")
        return None
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path


def _default_cache() -> str | None:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user id that nobody has, as in containers
        return None
    return str(root / "lora_jax" / "xla")


def compiler_options(setup: DeviceSetup, command_buffers: bool, cache: str | None) -> dict[str, object]:
    """Per-executable XLA options of a step. Autotuning results are kept, so that the plain and the LoRA executable of a
    bucket, and two starts, use the same GEMM configurations."""
    if not setup.is_gpu:
        return {}
    options: dict[str, object] = {"xla_gpu_enable_command_buffer": COMMAND_BUFFER_KINDS if command_buffers else ""}
    if command_buffers:
        options["xla_gpu_graph_min_graph_size"] = 1
    if cache:
        autotune = Path(cache) / "autotune" / setup.device.device_kind.replace(" ", "_")
        try:
            autotune.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            log.warning("autotuning results are not kept: %s cannot be made (%s)", autotune, e.strerror)
            return options
        options["xla_gpu_per_fusion_autotune_cache_dir"] = str(autotune)
    return options
