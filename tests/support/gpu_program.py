"""The program that XLA would run on a given NVIDIA card, compiled on a machine that has none.

Needs an interpreter that holds JAX's CUDA plugin wheels (no CUDA libraries, no driver). They live in an environment of
their own, so tests call `run_compiler`, and the module that it runs calls `compile_for`. Fusions, kernels, buffers,
donation and command buffers are those of the card; autotuned tile sizes are not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGETS = Path(__file__).with_name("targets")
CARDS = tuple(sorted(path.stem for path in TARGETS.glob("*.pbtxt")))

_KERNEL_THUNK = re.compile(r"\bk(?:CustomKernel|Kernel|Gemm|CublasLt\w*)\b")
_SHARED_MEMORY = re.compile(r"shared_memory: (\d+) bytes")
_DEBUG_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", re.MULTILINE)


def gpu_python() -> Path:
    """The interpreter with the plugin wheels: LORA_JAX_GPU_PYTHON, else .venv-gpu of this repository.

    Raises: RuntimeError that says how to make it.
    """
    path = Path(os.environ.get("LORA_JAX_GPU_PYTHON") or ROOT / ".venv-gpu" / "bin" / "python")
    if not path.exists():
        raise RuntimeError(
            f"{path} does not exist. Compiling for GPUs needs JAX's CUDA plugin wheels in an environment of their own: "
            "`make pytest` makes it, or set LORA_JAX_GPU_PYTHON to a Python that has jax, jax-cuda12-plugin and "
            "jax-cuda12-pjrt of one version, and this package"
        )
    return path


def run_compiler(module: str, *arguments: str, timeout: float = 900) -> Any:
    """Runs `python -m module arguments...` under gpu_python() in the repository's root; its last line is JSON: returned.

    Raises: RuntimeError with the end of its output if it fails.
    """
    done = subprocess.run(
        [str(gpu_python()), "-m", module, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def sharding(card: str) -> Any:
    """NamedSharding on one abstract card of that kind."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=(TARGETS / f"{card}.pbtxt").read_text(), topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_for(
    card: str, jitted: Any, *avals: Any, compiler_options: dict[str, Any] | None = None, **kwargs: Any
) -> tuple[Any, str]:
    """Compiles `jitted` for one of CARDS. avals, kwargs: pytrees of ShapeDtypeStruct or arrays of its arguments.

    Returns the executable, which cannot run here, and the text of its thunk sequence. Call it under gpu_python().
    """
    import jax

    placement = sharding(card)
    placed = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=placement), (avals, kwargs))
    with tempfile.TemporaryDirectory() as dump, jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
        lowered = jitted.trace(*placed[0], **placed[1]).lower(lowering_platforms=("cuda",))
        options = {**(compiler_options or {}), "xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options)
        # A second file exists where a pass changed the sequence, such as by making command buffers.
        sequences = sorted(Path(dump).glob("*thunk_sequence*.txt"), key=lambda path: ("after" in path.name, path.name))
        if not sequences:
            raise RuntimeError(f"XLA dumped no thunk sequence for {card}: {os.listdir(dump)}")
        return compiled, sequences[-1].read_text()


def summary(compiled: Any, thunks: str) -> dict[str, int]:
    """What one execution does: kernels, command buffers (CUDA graphs), shared memory a block and temporaries in bytes."""
    return {
        "kernels": len(_KERNEL_THUNK.findall(thunks)),
        "command_buffers": thunks.count("kCommandBuffer"),
        "shared_bytes": max((int(size) for size in _SHARED_MEMORY.findall(thunks)), default=0),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def program_text(compiled: Any) -> str:
    """The optimized program without names, source lines and whatever else differs between two equal programs."""
    text = _DEBUG_TABLES.sub("", compiled.as_text())
    text = re.sub(r", metadata=\{[^{}]*\}", "", text)
    text = re.sub(r',?\s*"?fingerprint_before_lhs"?\s*[=:]\s*"[0-9a-f]*"', "", text)
    return re.sub(r"^HloModule [^,\s]*", "HloModule", text)


def program_hash(compiled: Any) -> str:
    return hashlib.sha256(program_text(compiled).encode()).hexdigest()[:16]
