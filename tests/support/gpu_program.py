"""The program that XLA would run on a given NVIDIA card, compiled on a machine that has none.

Runs in an interpreter that holds JAX's CUDA plugin wheels (no CUDA libraries, no driver); `environment()` is what such a
process needs. Fusions, kernels, buffers, donation and command buffers are those of the card; autotuned tile sizes are not.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).with_name("targets")
CARDS = tuple(sorted(path.stem for path in TARGETS.glob("*.pbtxt")))
_KERNEL_THUNK = re.compile(r"\bk(?:CustomKernel|Kernel|Gemm|CublasLt\w*)\b")
_NAMES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", re.MULTILINE)


def environment() -> dict[str, str]:
    """Variables for a process that compiles for a card: no backend but CPU is started, no driver is asked for."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


@functools.cache
def _sharding(card: str) -> Any:
    import jax
    import numpy as np
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=(TARGETS / f"{card}.pbtxt").read_text(), topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_for(card: str, jitted: Any, *avals: Any, compiler_options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Compiles `jitted` for one of CARDS. avals: pytrees of ShapeDtypeStruct, or arrays, of its arguments.

    Returns the executable, which cannot run here, and the text of its thunk sequence.
    """
    import jax

    sharding = _sharding(card)
    placed = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding), avals)
    with tempfile.TemporaryDirectory() as dump, jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        lowered = jitted.trace(*placed).lower(lowering_platforms=("cuda",))
        options = {**(compiler_options or {}), "xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options)
        # A second file exists where a pass changed the sequence, such as by making command buffers.
        sequences = sorted(Path(dump).glob("*thunk_sequence*.txt"), key=lambda path: ("after" in path.name, path.name))
        if not sequences:
            raise RuntimeError(f"XLA dumped no thunk sequence for {card}: {os.listdir(dump)}")
        return compiled, sequences[-1].read_text()


def summary(compiled: Any, thunks: str) -> dict[str, int]:
    """Counts of what one execution does: kernels, command buffers (CUDA graphs), bytes of temporaries."""
    return {
        "kernels": len(_KERNEL_THUNK.findall(thunks)),
        "command_buffers": thunks.count("kCommandBuffer"),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def program_text(compiled: Any) -> str:
    """The optimized program without names, source lines and whatever else differs between two equal programs."""
    text = _NAMES.sub("", compiled.as_text())
    text = re.sub(r", metadata=\{[^{}]*\}", "", text)
    text = re.sub(r'"?fingerprint_before_lhs"?[=:]\s*"[0-9a-f]*",?', "", text)
    return re.sub(r"^HloModule [^,]*", "HloModule", text)


def program_hash(compiled: Any) -> str:
    import hashlib

    return hashlib.sha256(program_text(compiled).encode()).hexdigest()[:16]
