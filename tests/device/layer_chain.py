"""What one decoder layer of a decode step costs, with kernels of ours or of XLA: a chain of layers with their own weights.

    python tests/device/layer_chain.py                     # Llama-2-7B shape on a GPU, batch 8, context 96
    python tests/device/layer_chain.py --rows 64 --context 2047
    python tests/device/layer_chain.py --tiny              # on any backend, to see that it runs: without a GPU in plain JAX

Whole steps move by a per cent or two between machines; this compares forms of one layer in one process with alternating rounds,
and tells where the time goes. The weights of eight layers, 3.2 GB, fit no cache. Prints microseconds a layer, then the kernels.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.residual_matmul import fits_residual, residual_matmul
from lora_jax.kernels.skinny_matmul import skinny_matmul
from lora_jax.kernels.swiglu import swiglu

from lora_jax.device import compiler_options, set_up_device

LAYERS, PAGE_SIZE, CALLS, ROUNDS = 8, 16, 40, 6
EPS = 1e-5
FORMS: dict[
    str, dict[str, str]
] = {  # whose products (o and down with the residual stream and norms in them, or not), gate and up, norms
    "ours": dict(
        products="residual", gate_up="ours", norm="ours"
    ),  # as "norms of their own" where the rows are too many
    "norms of their own": dict(products="ours", gate_up="ours", norm="ours"),
    "gate and up of XLA": dict(products="ours", gate_up="xla", norm="ours"),
    "all products of XLA": dict(products="xla", gate_up="xla", norm="ours"),
    "norms of XLA too": dict(products="xla", gate_up="xla", norm="xla"),
}


def step(x, kvs, tables, positions, rope, weights, *, heads: int, products: str, gate_up: str, norm: str, kernels: str):
    """All layers of a decode step without adapters. kernels: the implementation of what is ours.
    Returns what is left of x, and the pages."""
    ours, out = dict(implementation=kernels), []
    norms = functools.partial(add_rms_norm, eps=EPS, implementation=kernels if norm == "ours" else "xla")

    def product(a, w):
        return a @ w if products == "xla" else skinny_matmul(a, w, **ours)

    def add(x, a, w, scale, arrivals):
        """x + a @ w, its norm, and arrivals."""
        if products == "residual" and fits_residual(x.shape[0], *w.shape, w.dtype):
            return residual_matmul(a, w, x, scale, arrivals, eps=EPS, **ours)
        return *norms(x, product(a, w), scale), arrivals

    def activate(normed, w):
        if gate_up == "ours":
            return swiglu(normed, w, **ours)
        gate, up = jnp.split(normed @ w, 2, -1)
        return jax.nn.silu(gate) * up

    x, normed = norms(x, None, weights[0]["norm"])
    arrivals = new_arrivals(max(x.shape[1] // 64, x.shape[0] * heads))
    for w, kv in zip(weights, kvs, strict=True):
        qkv = product(normed, w["qkv"])
        a, kv, arrivals = decode_attention(
            qkv, rope, kv, tables, positions, arrivals, heads=heads, scale=kv.shape[-1] ** -0.5, **ours
        )
        out.append(kv)
        x, normed, arrivals = add(x, a, w["o"], w["norm"], arrivals)
        x, normed, arrivals = add(x, activate(normed, w["gate_up"]), w["down"], w["norm"], arrivals)
    return x, out


def profile(call) -> dict[str, list[float]]:
    """Kernel name -> microseconds of each run, on the device."""
    found = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = list(Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(files[0])).planes if files else ()
        for plane in planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    found[event.name].append(event.duration_ns / 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=96, help="tokens before the new one")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    setup = set_up_device("auto", "auto", 0.9)
    hidden, heads, size, wide = (64, 4, 16, 128) if options.tiny else (4096, 32, 128, 11008)
    dtype, rows = jnp.bfloat16, options.rows
    random = lambda seed, *shape: (jax.random.normal(jax.random.key(seed), shape) * hidden**-0.5).astype(dtype)  # noqa: E731
    weights = [
        dict(
            qkv=random(10 * i, hidden, 3 * heads * size),
            o=random(10 * i + 1, heads * size, hidden),
            gate_up=random(10 * i + 2, hidden, 2 * wide),
            down=random(10 * i + 3, wide, hidden),
            norm=jnp.ones((hidden,), dtype),
        )
        for i in range(LAYERS)
    ]
    pages = max(16, -(-(options.context + 1) // PAGE_SIZE))
    tables = 1 + np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages).astype(np.int32)
    kvs = [random(1000 + i, 1 + rows * pages, PAGE_SIZE, 2, heads, size) for i in range(LAYERS)]
    angles = jnp.linspace(0.0, 3.0, rows * size // 2).reshape(rows, size // 2)
    given = (tables, np.full(rows, options.context, np.int32), (jnp.cos(angles), jnp.sin(angles)), weights)
    given, x = jax.device_put(given), random(7, rows, hidden)
    compiling: Any = compiler_options(setup, True, None) or None
    programs = {}
    for name, form in FORMS.items():
        run = functools.partial(step, heads=heads, kernels=setup.implementation, **form)
        lowered = jax.jit(run, donate_argnums=1).lower(x, kvs, *given)
        programs[name] = lowered.compile(compiler_options=compiling)
    times: dict[str, list[float]] = {name: [] for name in programs}
    results = {}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            out, kvs = program(x, kvs, *given)  # also warms up
            jax.block_until_ready(out)
            start = time.perf_counter()
            for _ in range(CALLS):
                out, kvs = program(x, kvs, *given)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / CALLS / LAYERS * 1e6)
            results[name] = np.asarray(out, np.float32)
    first = next(iter(results.values()))
    for name, values in times.items():
        off = np.linalg.norm(results[name] - first) / np.linalg.norm(first)
        assert off < 0.02, f"{name} computes something else: off by {off:.3f}"
        print(f"{name:<22} {statistics.median(values):8.1f} us a layer ({min(values):.1f} to {max(values):.1f})")

    for name, program in programs.items():

        def call(program=program):
            nonlocal kvs
            out, kvs = program(x, kvs, *given)
            return out

        kernels = profile(call)
        a_layer = {k: round(statistics.median(v), 2) for k, v in kernels.items() if len(v) >= LAYERS - 1}
        print(json.dumps({name: dict(sorted(a_layer.items(), key=lambda item: -item[1]))}))


if __name__ == "__main__":
    main()
