"""Where the time of an engine's decode steps goes: kernels, launches and gaps, from a profile with CUDA graphs left on.

    python tests/device/step_profile.py 8:0 8:1 8:8 64:32 256:zipf       # ROWS:ADAPTERS of rank 16, Llama-2-7B shape
    python tests/device/step_profile.py --model tiny 4:0 4:2             # on any backend, to see that it runs: no kernels

All in one engine. zipf: adapter k of all in proportion to 1 / (k + 1) on 70 % of the rows. A profiled step is longer than one
without: the line of a kind has both.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_enable_command_buffers_during_profiling=true"

import jax
import numpy as np

from lora_jax.bench.adapters import load_random_adapters
from lora_jax.config import EngineArgs
from lora_jax.engine import Engine
from lora_jax.request import LoRARequest, SamplingParams, TokensPrompt

PROMPT, RANK, SETTLED, TIMED, PROFILED = 64, 16, 20, 50, 12
Event = tuple[float, float, str]  # begin and end in us, name


def rows_of(kind: str, adapters: list[LoRARequest], rng: np.random.Generator) -> list[LoRARequest | None]:
    """The adapter of each row of ROWS:ADAPTERS."""
    rows, _, who = kind.partition(":")
    if who != "zipf":
        return [adapters[i % int(who)] if int(who) else None for i in range(int(rows))]
    weights = 1 / np.arange(1, len(adapters) + 1)
    drawn = rng.choice(len(adapters), int(rows), p=weights / weights.sum())
    return [adapters[k] if rng.random() < 0.7 else None for k in drawn]


def start(engine: Engine, rows: list[LoRARequest | None], rng: np.random.Generator) -> None:
    """Requests for all rows, decoding together."""
    params = SamplingParams(
        max_tokens=SETTLED + TIMED + PROFILED + len(rows) + 8, temperature=0, ignore_eos=True, detokenize=False
    )
    for adapter in rows:
        prompt = TokensPrompt(prompt_token_ids=rng.integers(10, 500, PROMPT).tolist())
        engine.add_request(engine.make_request(prompt, params, adapter))
    together = 0
    while together < SETTLED:
        together += sum(bool(output.token_ids) for output in engine.step()) == len(rows)


def stop(engine: Engine) -> None:
    for request_id in list(engine._outputs):
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    engine.drain()


def profile(engine: Engine) -> list[Event]:
    """Of PROFILED steps, in order."""
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                engine.step()
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    of_device = line.events if line.name.startswith("Stream") else ()
                    events += [(e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3, e.name) for e in of_device]
    return sorted(events)


def busy(events: list[Event]) -> float:
    total, until = 0.0, events[0][0]
    for begin, end, _ in events:
        total, until = total + max(0.0, end - max(begin, until)), max(until, end)
    return total


def table(kind: str, step: float, events: list[Event], top: int) -> list[str]:
    """step: ms of one without a profile. All others us."""
    if not events:
        return [f"{kind:<9} {step:8.3f} ms a step; nothing ran on a GPU"]
    span = max(end for _, end, _ in events) - events[0][0]
    names: dict[str, list[float]] = collections.defaultdict(list)
    for begin, end, name in events:
        names[re.sub(r"[._]\d+$", "", name)].append(end - begin)
    per_step = lambda us: us / PROFILED  # noqa: E731
    lines = [
        f"{kind:<9} {step:8.3f} ms a step; profiled {per_step(span):.0f} us, idle {per_step(span - busy(events)):.0f}, "
        f"{len(events) / PROFILED:.0f} kernels and copies"
    ]
    for name, values in sorted(names.items(), key=lambda item: -sum(item[1]))[:top]:
        lines.append(
            f"{kind:<9} {per_step(sum(values)):9.1f} us {len(values) / PROFILED:6.1f} x {np.mean(values):7.2f}  {name[:60]}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", metavar="ROWS:ADAPTERS")
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--max-loras", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--top", type=int, default=16, metavar="N", help="kernels shown of each kind")
    o = parser.parse_args()
    sizes: dict[str, Any] = dict(max_num_seqs=o.max_num_seqs, max_model_len=o.max_model_len, max_loras=o.max_loras)
    engine = Engine(
        EngineArgs(o.model, load_format="dummy", enable_lora=True, max_lora_rank=RANK, disable_tqdm=True, **sizes)
    )
    adapters, rng = load_random_adapters(engine, o.max_loras, RANK), np.random.default_rng(0)
    for kind in o.kinds:
        start(engine, rows_of(kind, adapters, rng), rng)
        begin = time.perf_counter()
        for _ in range(TIMED):
            engine.step()
        step = (time.perf_counter() - begin) / TIMED * 1e3
        for line in table(kind, step, profile(engine), o.top):
            print(line, flush=True)
        stop(engine)


if __name__ == "__main__":
    main()
