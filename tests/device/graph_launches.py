"""What the driver is asked to launch while one step runs again and again, read from a profile; JSON on standard output.

python tests/device/graph_launches.py STEPS: the model steps of a tiny engine, with command buffers ("on") and without ("off").
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when programs are compiled: without it XLA launches kernel by kernel whenever a profiler is at work.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_enable_command_buffers_during_profiling=true"

import jax

from lora_jax import LLM

LAUNCH = re.compile(r"^(?:cu|cuda)(Graph)?Launch")


def launches(call: Callable[[], Any], times: int) -> dict[str, int]:
    """Launches of graphs, and of kernels outside of graphs, during `times` calls; and how many times something ran on the
    device: measured with jax 0.11.2, the kernels of our layers do not show among the launches, one by one or not."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(times)])
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    found: collections.Counter[str] = collections.Counter(graphs=0, kernels=0, on_device=0)
    for plane in profile.planes:
        if plane.name.startswith("/device"):
            streams = [line for line in plane.lines if line.name.startswith("Stream")]
            found["on_device"] += sum(not event.name.startswith("Memcpy") for line in streams for event in line.events)
            continue
        for event in (event for line in plane.lines for event in line.events):
            if match := LAUNCH.match(event.name):
                found["graphs" if match[1] else "kernels"] += 1
    return dict(found)


def of_an_engine(steps: int, command_buffers: bool) -> dict[str, dict[str, int]]:
    """By key of the model's steps: what is launched in `steps` calls."""
    llm = LLM(
        "tiny",
        load_format="dummy",
        enable_lora=True,
        max_loras=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        num_pages=40,
        disable_tqdm=True,
        compilation_cache_dir="",
        enable_command_buffers=command_buffers,
    )
    runtime = llm.engine._runtime
    keys = [key for key in runtime.table.keys() if key.phase in ("decode", "prefill")]
    return {str(key): launches(lambda key=key: runtime._model_step(key, ()), steps) for key in keys}


def main(steps: int) -> None:
    print(json.dumps({"on": of_an_engine(steps, True), "off": of_an_engine(steps, False)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
