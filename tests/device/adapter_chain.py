"""What adapters cost a decoder layer of a decode step: a chain of layers with their own weights and adapters, on a GPU.

    python tests/device/adapter_chain.py --rows 8 --active 1 8                        # Llama-2-7B shape, rank 16, 8 slots
    python tests/device/adapter_chain.py --rows 8 --rank 64 --slot-rank 64 --active 8 --profile
    python tests/device/adapter_chain.py --tiny                                       # on any backend, to see that it runs

Forms of one layer (FORMS: what they change of the kernels' rules) in one process with alternating rounds. Prints microseconds a
layer and what is above the layer without adapters; with --profile the kernels as well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import layer_chain
import lora_jax.kernels.fused_plan as fused_plan
import lora_jax.kernels.tuning as tuning
import numpy as np
from lora_jax.kernels.adapters import Adapters, adapter_counters
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.lora_items import most_items, work_items
from lora_jax.kernels.lora_layout import padded_rank
from lora_jax.kernels.residual_matmul import fits_residual, residual_matmul
from lora_jax.kernels.skinny_matmul import skinny_lora_matmul, skinny_matmul
from lora_jax.kernels.swiglu import lora_swiglu, swiglu
from lora_jax.kernels.tuning import LoRATiles

from lora_jax.config import PLACE_RANK
from lora_jax.device import compiler_options, set_up_device

PLAIN, PAGE_SIZE, EPS = "plain", 16, 1e-5
LINEARS = ("qkv", "o", "gate_up", "down")


@contextlib.contextmanager
def _tiles(change: Callable[[LoRATiles, dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """The cut of the adapters' programs, changed by what change(tiles, sizes) says."""
    rule, names = fused_plan.lora_tiles, ("rows", "inputs", "slices", "items", "rank", "itemsize", "columns")

    def changed(*sizes, waits):
        tiles, given = rule(*sizes, waits=waits), dict(zip(names, sizes, strict=True), waits=waits)
        return dataclasses.replace(tiles, **change(tiles, given))

    with mock.patch.object(fused_plan, "lora_tiles", changed):
        yield


def _groups(tiles: LoRATiles, sizes: dict[str, Any], most: int) -> dict[str, Any]:
    """Fewer programs shrink many items, each several passes of them."""
    return dict(groups=min(tiles.groups, most)) if sizes["items"] > tuning.FEW_ITEMS else {}


def _chunk(tiles: LoRATiles, sizes: dict[str, Any], chunk: int) -> dict[str, Any]:
    return dict(chunk=chunk) if tiles.joined and sizes["waits"] else {}


@dataclasses.dataclass(frozen=True)
class Form:
    """tiles: see `_tiles`. dense_rows: up to which joined h is a matrix of all items where slots have one item each."""

    tiles: Callable[[LoRATiles, dict[str, Any]], dict[str, Any]] | None = None
    dense_rows: int = fused_plan.DENSE_ROWS


FORMS: dict[str, Form] = {
    PLAIN: Form(),
    "as it is": Form(),
    "8 groups": Form(tiles=functools.partial(_groups, most=8)),
    "chunks of 32": Form(tiles=functools.partial(_chunk, chunk=32)),
    "chunks of 128": Form(tiles=functools.partial(_chunk, chunk=128)),
    "rows' own h": Form(dense_rows=0),
    "dense h": Form(dense_rows=64),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int = 4096
    heads: int = 32
    size: int = 128
    wide: int = 11008

    def inputs(self, linear: str) -> int:
        return {"down": self.wide, "o": self.heads * self.size}.get(linear, self.hidden)

    def slices(self, linear: str) -> tuple[int, ...]:
        own = self.heads * self.size
        return {"qkv": (own,) * 3, "gate_up": (self.wide,) * 2}.get(linear, (self.hidden,))


def step(x, kvs, tables, positions, rope, weights, stacks, slot_ids, items, places, *, shape, adapted, kernels):
    """All layers of a decode step: what is left of x, and the pages."""
    how: dict[str, Any] = dict(implementation=kernels)
    out, rows = [], x.shape[0]
    few = kernels == "triton" and fits_residual(rows, shape.hidden, shape.hidden, x.dtype)
    counters = adapter_counters(items, len(weights)) if adapted else 0
    arrivals = new_arrivals(max(shape.hidden // 64, rows * shape.heads) + counters)

    def adapters(linear: str, layer: int) -> Adapters | None:
        if not adapted:
            return None
        number, slices = LINEARS.index(linear), shape.slices(linear)
        return Adapters(*stacks[linear], slot_ids, items, jnp.int32(layer), slices, number, places)

    def product(a, w, own, arrivals):
        return skinny_lora_matmul(a, w, own, arrivals, **how) if own else (skinny_matmul(a, w, **how), arrivals)

    def add(x, a, w, own, scale, arrivals):
        if few:
            return residual_matmul(a, w, x, scale, arrivals, eps=EPS, adapters=own, **how)
        y, arrivals = product(a, w, own, arrivals)
        return *add_rms_norm(x, y, scale, eps=EPS, **how), arrivals

    x, normed = add_rms_norm(x, None, weights[0]["norm"], eps=EPS, **how)
    for i, (w, kv) in enumerate(zip(weights, kvs, strict=True)):
        qkv, arrivals = product(normed, w["qkv"], adapters("qkv", i), arrivals)
        given, own = (qkv, rope, kv, tables, positions, arrivals), adapters("o", i)
        options = dict(heads=shape.heads, scale=shape.size**-0.5, **how)
        a, kv, arrivals = decode_attention(*given, **options)
        out.append(kv)
        x, normed, arrivals = add(x, a, w["o"], own, w["norm"], arrivals)
        own = adapters("gate_up", i)
        if own is None:
            wide = swiglu(normed, w["gate_up"], **how)
        else:
            wide, arrivals = lora_swiglu(normed, w["gate_up"], own, arrivals, **how)
        x, normed, arrivals = add(x, wide, w["down"], adapters("down", i), w["norm"], arrivals)
    return x, out


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--active", type=int, nargs="+", default=[1, 8], help="adapters, shared out over the rows")
    parser.add_argument("--rank", type=int, nargs="+", default=[16], help="of the adapters, in turn")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--slot-rank", type=int, default=16, help="what slots have room for")
    parser.add_argument("--room", type=int, help="items that the step has room for (default: all that slots can hold)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=20, help="of one round")
    parser.add_argument("--context", type=int, default=96, help="tokens before the new one")
    parser.add_argument("--only", nargs="+", choices=list(FORMS)[1:], default=list(FORMS)[1:], help="forms")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


class Chain:
    """The operands of all runs, and what runs them."""

    def __init__(self, o: argparse.Namespace):
        self.setup = set_up_device("auto", "auto", 0.9)
        self.o, self.shape, self.layers = o, Shape(64, 4, 16, 128) if o.tiny else Shape(), 2 if o.tiny else o.layers
        self.padded = padded_rank(o.slot_rank)
        place = min(self.padded, PLACE_RANK)
        pieces = self.padded // place
        every = np.arange(o.slots * pieces, dtype=np.int32).reshape(o.slots, pieces)
        self.places = every if pieces > 1 else None
        sizes = {name: (self.shape.inputs(name), sum(self.shape.slices(name))) for name in LINEARS}
        norm = jnp.ones((self.shape.hidden,), jnp.bfloat16)
        weights = [
            {name: self._normal(10 * i + n, sizes[name]) for n, name in enumerate(LINEARS)} | dict(norm=norm)
            for i in range(self.layers)
        ]
        stacks = {}
        for n, name in enumerate(LINEARS):
            slots, (inputs, outputs) = (self.layers, o.slots * pieces), sizes[name]
            a = self._normal(5000 + n, (*slots, len(self.shape.slices(name)) * place, inputs))
            stacks[name] = a, self._normal(6000 + n, (*slots, place, outputs))
        pages = max(16, -(-(o.context + 1) // PAGE_SIZE))
        tables = 1 + np.random.default_rng(0).permutation(o.rows * pages).reshape(o.rows, pages).astype(np.int32)
        page = (PAGE_SIZE, 2, self.shape.heads, self.shape.size)
        self.kvs = [self._normal(1000 + i, (1 + o.rows * pages, *page)) for i in range(self.layers)]
        angles = jnp.linspace(0.0, 3.0, o.rows * self.shape.size // 2).reshape(o.rows, self.shape.size // 2)
        rope = jnp.cos(angles), jnp.sin(angles)
        self.given = jax.device_put((tables, np.full(o.rows, o.context, np.int32), rope, weights, stacks))
        self.x = self._normal(7, (o.rows, self.shape.hidden))
        self.adapters = {n: jax.device_put(self._active(n)) for n in o.active}

    def _normal(self, seed: int, dims: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16) * self.shape.hidden**-0.5).astype(
            jnp.bfloat16
        )

    def _active(self, count: int) -> tuple[Any, ...]:
        """(slot ids, items, places) of so many adapters."""
        o = self.o
        ids = np.arange(o.rows, dtype=np.int32) % count
        ranks = np.tile(np.resize(np.array(o.rank, np.int32), o.slots), (len(LINEARS), 1))
        room = o.room or most_items(min(o.slots, o.rows), self.padded)
        return ids, work_items(sorted(set(ids.tolist())), ranks, self.padded, room, self.places), self.places

    def program(self, name: str) -> Any:
        form, how = FORMS[name], dict(shape=self.shape, kernels=self.setup.implementation)
        run = functools.partial(step, adapted=name != PLAIN, **how)
        compiling: Any = compiler_options(self.setup, True, None) or None
        jax.clear_caches()  # kernels are jitted functions, which would keep the tiles of the form before
        dense = mock.patch.object(fused_plan, "DENSE_ROWS", form.dense_rows)
        with dense, _tiles(form.tiles) if form.tiles else contextlib.nullcontext():
            lowered = jax.jit(run, donate_argnums=1).lower(
                self.x, self.kvs, *self.given, *self.adapters[self.o.active[0]]
            )
            return lowered.compile(compiler_options=compiling)

    def call(self, program: Any, active: int) -> jax.Array:
        out, self.kvs = program(self.x, self.kvs, *self.given, *self.adapters[active])
        return out

    def time(self, program: Any, active: int) -> float:
        """us a layer"""
        jax.block_until_ready(self.call(program, active))
        start = time.perf_counter()
        outs = [self.call(program, active) for _ in range(self.o.calls)]
        jax.block_until_ready(outs)
        return (time.perf_counter() - start) / self.o.calls / self.layers * 1e6


def main() -> None:
    o = _options()
    chain = Chain(o)
    programs = {name: chain.program(name) for name in (PLAIN, *o.only)}
    runs = [(PLAIN, o.active[0]), *((name, n) for name in o.only for n in o.active)]
    times: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    for _ in range(o.rounds):
        for name, n in runs:
            times[name, n].append(chain.time(programs[name], n))
    results: dict[int, np.ndarray] = {}  # of the first form with so many adapters
    for (name, n), values in times.items():
        if name != PLAIN:
            got = np.asarray(chain.call(programs[name], n), np.float32)
            first = results.setdefault(n, got)
            off = np.linalg.norm(got - first) / np.linalg.norm(first)
            assert off < 0.1, f"{name} computes something else: off by {off:.3f}"
        over = statistics.median(a - b for a, b in zip(values, times[runs[0]], strict=True))
        who = "" if name == PLAIN else f"{n} of rank {','.join(map(str, o.rank))}"
        print(f"{name:<22} {who:<20} {statistics.median(values):8.1f} us a layer {over:+7.2f}", flush=True)
    for name, n in runs if o.profile else ():
        kernels = layer_chain.profile(functools.partial(chain.call, programs[name], n))
        a_layer = {k: round(statistics.median(v), 2) for k, v in kernels.items() if len(v) >= chain.layers - 1}
        print(json.dumps({f"{name}, {n}": dict(sorted(a_layer.items(), key=lambda item: -item[1]))}), flush=True)


if __name__ == "__main__":
    main()
