"""The LoRA kernels on a real GPU: every case of kernels/cases.py against numpy float64, then the time of decode shapes.

    python tests/device/kernels_on_gpu.py               # needs numpy and jax; exits 1 if a case is wrong
    python tests/device/kernels_on_gpu.py --sweep       # decode times of other tile sizes as well
    python tests/device/kernels_on_gpu.py --interpret   # the small cases, interpreted on any backend

Large results are compared on some rows and columns: every slot in use, both ends of every slice.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def _kernels(module: str) -> Any:
    """A module of lora_jax.kernels, also where the package is not installed."""
    try:
        return importlib.import_module(f"lora_jax.kernels{module}")
    except ModuleNotFoundError:
        name = "lora_jax_kernels"
        if name not in sys.modules:
            folder = ROOT / "kernels"
            spec = importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return importlib.import_module(name + module)


kernels, cases = _kernels(""), _kernels(".cases")
shrink_module, expand_module = _kernels(".lora_shrink"), _kernels(".lora_expand")
oracle = importlib.import_module("tests.support.lora_oracle")

CHECKED_ROWS, CHECKED_COLUMNS = 24, 768


@functools.cache
def _normal(seed: int) -> np.ndarray:
    """A prime number of values, so that no two adapters repeat each other where they are repeated to fill an array."""
    return np.random.default_rng(seed).standard_normal(1_000_003, np.float32)


def _random(shape: tuple[int, ...], dtype: str, scale: float, seed: int) -> np.ndarray:
    return np.resize((scale * _normal(seed)).astype(jnp.dtype(dtype)), shape)


def make(case: Any) -> tuple[np.ndarray, ...]:
    """x, a, b, y, slot_ids, layer, on the host; layer is the last."""
    linear, dtype, stack = case.linear, case.dtype, (case.layers, case.slots)
    columns, size = sum(linear.slices), linear.inputs
    return (
        _random((case.rows, size), dtype, 1.0, 1),
        _random((*stack, len(linear.slices) * case.rank, size), dtype, size**-0.5, 2),
        _random((*stack, case.rank, columns), dtype, case.rank**-0.5, 3),
        _random((case.rows, columns), dtype, 1.0, 4),
        case.slot_ids(),
        np.array(case.layers - 1, np.int32),
    )


def lora(x, a, b, y, slot_ids, layer, *, slices: tuple[int, ...], implementation: str, interpret: bool = False):
    options = dict(implementation=implementation, interpret=interpret)
    h = kernels.lora_shrink(x, a, slot_ids, layer, **options)
    return kernels.lora_expand(y, h, b, slot_ids, layer, slices=slices, **options)


def some_rows(slot_ids: np.ndarray) -> np.ndarray:
    """Each slot's first row, the last row, and others up to CHECKED_ROWS."""
    wanted = [*np.unique(slot_ids, return_index=True)[1], len(slot_ids) - 1]
    return np.unique([*wanted, *np.linspace(0, len(slot_ids) - 1, CHECKED_ROWS).astype(int)])[: 2 * CHECKED_ROWS]


def some_columns(slices: tuple[int, ...]) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Columns of each slice to compare, and their numbers: all of a narrow slice, both ends and a sample of a wide one."""
    chosen, start, share = [], 0, CHECKED_COLUMNS // len(slices)
    for width in slices:
        inner = np.arange(width) if width <= share else np.unique(np.linspace(0, width - 1, share).astype(int))
        chosen.append(start + inner)
        start += width
    return chosen, tuple(map(len, chosen))


def check(case: Any, given: tuple[np.ndarray, ...], out: np.ndarray) -> dict[str, Any]:
    """Largest error relative to its bound, and the share of elements that a wrong slot puts beyond it."""
    x, a, b, y, ids, layer = given
    rows, (groups, widths) = some_rows(ids), some_columns(case.linear.slices)
    columns = np.concatenate(groups)
    a, b = a[layer], {slot: b[layer, slot][:, columns] for slot in range(case.slots)}
    x, y, chosen = x[rows], y[rows][:, columns], ids[rows]
    got = out[rows][:, columns].astype(np.float64)
    want, bound = oracle.lora(x, a, b, y, chosen, widths)
    active = chosen >= 0
    wrong, _ = oracle.lora(x[active], a, b, y[active], (chosen[active] + 1) % case.slots, widths)
    told = float((np.abs(got[active] - wrong) > bound[active]).mean())
    untouched = out[ids < 0].tobytes() == given[3][ids < 0].tobytes()
    ratio = float((np.abs(got - want)[active] / bound[active]).max())
    return {"error": ratio, "told": told, "untouched": untouched, "ok": ratio <= 1 and told > 0.9 and untouched}


def run_cases(interpret: bool) -> bool:
    chosen = [case for case in cases.CASES if not interpret or small(case)]

    def compile_case(case: Any) -> tuple[Any, float]:
        options: dict[str, Any] = dict(implementation="triton", interpret=interpret)
        start = time.perf_counter()
        lowered = jax.jit(functools.partial(lora, slices=case.linear.slices, **options)).lower(*make(case))
        return lowered.compile(), time.perf_counter() - start

    good = True
    print(f"{'case':<52}{'compile s':>10}{'error/bound':>13}{'wrong slot':>12}  base rows")
    with ThreadPoolExecutor(1 if interpret else 8) as pool:
        for case, future in [(case, pool.submit(compile_case, case)) for case in chosen]:
            try:
                compiled, seconds = future.result()
                given = make(case)
                found = check(case, given, np.asarray(compiled(*given)))
            except Exception as error:
                print(f"{case.id:<52} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                good = False
                continue
            good &= found["ok"]
            verdict = ("equal" if found["untouched"] else "CHANGED") + ("" if found["ok"] else "   WRONG")
            print(f"{case.id:<52}{seconds:>10.2f}{found['error']:>13.3f}{found['told']:>11.1%}  {verdict}", flush=True)
    return good


def small(case: Any) -> bool:
    return case.rows < 500 and case.linear.inputs * sum(case.linear.slices) <= 1 << 20


def run_large_stack(layers: int = 65, slots: int = 32, rank: int = 256, size: int = 8192) -> bool:
    """Stacks of more than 2^32 elements (8.7 GB each): the last adapter of the last layer is found."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit < 24e9:
        print(f"stacks of more than 2^32 elements: not run, {limit / 1e9:.0f} GB of device memory are too few")
        return True
    case = cases.Case(cases.Linear("large", size, (size,)), 8, rank, "identical", slots=1, layers=1)
    x, a, b, y, ids, _ = make(case)

    @jax.jit
    def stack(own: jax.Array) -> jax.Array:
        return jnp.zeros((layers, slots, rank, size), own.dtype).at[-1, -1].set(own[0, 0])

    function = jax.jit(functools.partial(lora, slices=case.linear.slices, implementation="triton"))
    last = np.full(case.rows, slots - 1, np.int32), np.array(layers - 1, np.int32)
    got = np.asarray(function(x, stack(a), stack(b), y, *last)).astype(np.float64)
    want, bound = oracle.lora(x, a[0], b[0], y, ids, case.linear.slices)
    ratio = float((np.abs(got - want) / bound).max())
    print(f"{f'stacks of {layers * slots * rank * size:.2e} elements':<52}{'':>10}{ratio:>13.3f}", flush=True)
    return ratio <= 1


DEPTH = 32  # layers in a chain: together more than the L2 cache holds


def decode_times(
    linear: Any, rows: int, mixes: tuple[str, ...], implementation: str, repeats: int = 15
) -> dict[str, tuple[float, float]]:
    """mix -> (microseconds of one shrink and expand, GB/s of the adapters' bytes)."""
    case = cases.Case(linear, rows, 16, mixes[0], slots=8, layers=DEPTH)
    x, a, b, start_y, *_ = (jax.device_put(v) for v in make(case))
    one = jax.jit(functools.partial(lora, slices=linear.slices, implementation=implementation))

    @functools.partial(jax.jit, donate_argnums=3)
    def chain(x, a, b, y, slot_ids):
        for layer in range(DEPTH):
            y = one(x, a, b, y, slot_ids, jnp.int32(layer))
        return y

    found = {}
    for mix in mixes:
        ids = jax.device_put(dataclasses.replace(case, mix=mix).slot_ids())
        y, times = chain(x, a, b, start_y + 0, ids), []
        for _ in range(repeats):
            jax.block_until_ready(y)
            start = time.perf_counter()
            for _ in range(4):
                y = chain(x, a, b, y, ids)
            jax.block_until_ready(y)
            times.append((time.perf_counter() - start) / 4 / DEPTH)
        seconds = float(np.median(times))
        used = len(set(np.asarray(ids).tolist()) - {-1})
        size = used * (a.nbytes + b.nbytes) / DEPTH / case.slots
        found[mix] = (seconds * 1e6, size / seconds / 1e9)
    return found


DECODE = ("llama2-7b.qkv", "llama2-7b.o", "llama2-7b.gate_up", "llama2-7b.down")


def run_times() -> dict[str, Any]:
    report = {}
    print(f"\n{'decode, rank 16: shrink + expand of one linear':<52}{'triton us':>10}{'GB/s':>8}{'xla us':>10}")
    for name in DECODE:
        linear = cases.LINEARS[name]
        for rows, mixes in ((8, ("distinct", "identical", "none")), (64, ("distinct",))):
            triton = decode_times(linear, rows, mixes, "triton")
            xla = decode_times(linear, rows, mixes, "xla") if rows == 8 else {}
            for mix, (us, rate) in triton.items():
                label, xla_us = f"{name}-t{rows}-{mix}", round(xla[mix][0], 2) if mix in xla else None
                report[label] = {"us": round(us, 2), "gb_s": round(rate), "xla_us": xla_us}
                print(f"{label:<52}{us:>10.2f}{rate:>8.0f}{xla_us or '':>10}", flush=True)
    return report


def run_sweep() -> None:
    """Decode times with other tiles in place of those that kernels/tuning.py picks."""
    chosen_shrink, chosen_expand = shrink_module.shrink_tiles, expand_module.expand_tiles

    def with_shrink(block_k: int, warps: int, *args: int) -> Any:
        tiles = chosen_shrink(*args)
        blocks = -(-args[1] // block_k)
        steps = -(-blocks // 32)
        return dataclasses.replace(tiles, block_k=block_k, num_warps=warps, steps=steps, parts=-(-blocks // steps))

    def with_expand(block_n: int, warps: int, *args: Any) -> Any:
        return dataclasses.replace(chosen_expand(*args), block_n=block_n, num_warps=warps)

    for name in DECODE:
        linear = cases.LINEARS[name]
        for block_k, shrink_warps in ((128, 1), (256, 1), (256, 2), (256, 4), (512, 4)):
            shrink_module.shrink_tiles = functools.partial(with_shrink, block_k, shrink_warps)
            us, _ = decode_times(linear, 8, ("distinct",), "triton")["distinct"]
            print(f"{name:<20} shrink block_k {block_k:>4} warps {shrink_warps}: {us:.2f} us", flush=True)
        shrink_module.shrink_tiles = chosen_shrink
        for block_n, expand_warps in ((64, 1), (128, 1), (128, 2), (256, 1), (256, 2), (256, 4)):
            expand_module.expand_tiles = functools.partial(with_expand, block_n, expand_warps)
            us, _ = decode_times(linear, 8, ("distinct",), "triton")["distinct"]
            print(f"{name:<20} expand block_n {block_n:>4} warps {expand_warps}: {us:.2f} us", flush=True)
        expand_module.expand_tiles = chosen_expand


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also time other tile sizes")
    parser.add_argument("--interpret", action="store_true", help="small cases only, interpreted, no times")
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    if not options.interpret and jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU (or --interpret)", file=sys.stderr)
        return 2
    start = time.perf_counter()
    good = run_cases(options.interpret)
    report: dict[str, Any] = {}
    if not options.interpret:
        good &= run_large_stack()
        report = run_times()
        if options.sweep:
            run_sweep()
    print(json.dumps({"ok": good, "seconds": round(time.perf_counter() - start, 1), "decode": report}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
