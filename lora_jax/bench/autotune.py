"""`bench kernels --model`: the products and the attention of a model's decode steps, with the tiles that their rules pick from
shapes alone and with measured ones: those stored in the compile cache's folder, or with --autotune found now and stored there.

The search begins at the rule's choice and takes the fastest of its neighbours, twice; all run in alternating rounds, and what does
not beat the rule in a round of their own is not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from lora_jax.kernels.candidates import LARGEST_CARD, SMALLEST_CARD, candidates, named, to_data
from lora_jax.kernels.tuned import RULES, Key, Recorder, TileTable, tiles_in_use

from ..builder import one_layer_spec
from ..cli_args import engine_args_from
from ..compile_cache import cache_folder
from ..config import EngineArgs
from ..device import DeviceSetup, set_up_device
from ..errors import ConfigError
from ..tiles import check_tiles_file, read_tiles, table_name, tiles_file, write_tiles
from . import kernel_timing as timing
from . import report
from .layer_ops import LayerOp, layer_ops, settled
from .paired import alternate

GAIN = 0.02  # that tiles must be faster by than the rule's
PASSES = 2  # neighbours of the rule's choice, then of the best of those
FIRST_ROUNDS, HOPELESS = 3, 1.05  # after so many rounds what is slower than the best by this factor drops out
SHARED: dict[tuple[int, ...], int] = {
    (8, 0): 163 << 10,
    (9, 0): LARGEST_CARD,
    (10, 0): LARGEST_CARD,
    (10, 3): LARGEST_CARD,
}  # by compute capability


@dataclasses.dataclass
class Found:
    """Of one op. seconds, tuned: with the rule's tiles and with measured ones, None where none are better. tried: programs with
    other tiles; failed: of those, what did not compile or gave other numbers."""

    op: LayerOp
    seconds: float
    tuned: float | None
    tiles: dict[Key, Any]
    tried: int = 0
    failed: int = 0
    host_bound: bool = False

    def as_dict(self) -> dict[str, Any]:
        size = self.op.must_read()
        rate = lambda seconds: None if seconds is None else size / seconds / 1e9  # noqa: E731
        return {
            "bytes": size,
            "heuristic_us": self.seconds * 1e6,
            "heuristic_gb_per_second": rate(self.seconds),
            "tuned_us": None if self.tuned is None else self.tuned * 1e6,
            "tuned_gb_per_second": rate(self.tuned),
            "tiles": to_data(TileTable.of(self.tiles)),
            "tried": self.tried,
            "failed": self.failed,
            "host_bound": self.host_bound,
        }


def run(options: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Times every op, shows a table and returns it; with --autotune stores what is better. Raises: LoraJaxError, ConfigError."""
    begin = time.perf_counter()
    args = engine_args(options)
    setup = set_up_device(args.device, args.implementation, args.gpu_memory_utilization)
    spec = one_layer_spec(args, setup, None, TileTable())
    ops = chosen(layer_ops(spec, buckets(options.batch_size, spec.builder.scheduler.row_buckets)), options.only)
    path, name = tiles_file(cache_folder(args.compilation_cache_dir)), table_name(setup.device)
    stored = TileTable() if path is None or setup.implementation != "triton" else read_tiles(path, name)
    if options.autotune and path is not None and setup.implementation == "triton":
        try:
            check_tiles_file(path)
        except OSError as e:
            raise ConfigError(
                f"--autotune: {path} cannot be written: {e.strerror}; see --compilation-cache-dir"
            ) from None
    search = Search(setup, options.num_iters or 9, begin + options.max_seconds)
    width = max(len(op.name) for op in ops) + 2
    for line in heading(options.autotune, setup, path, stored, width):
        show(line)
    found: dict[str, Found] = {}

    def result() -> dict[str, Any]:
        return {
            "model": args.model,
            "dtype": str(jnp.dtype(spec.dtype)),
            "num_iters": search.rounds,
            "autotune": options.autotune,
            "ops": {name: one.as_dict() for name, one in found.items()},
            "left_out": [op.name for op in ops if op.name not in found],
            "table": {"file": None if path is None else str(path), "name": name, "entries": len(stored.entries)},
            "hardware": report.hardware(setup.device),
        }

    with tqdm(total=len(ops), desc="kernels", unit="op", disable=options.disable_tqdm) as bar:
        for op in ops:
            if time.perf_counter() > search.deadline:
                break
            found[op.name] = search.tune(op) if options.autotune else search.compare(op, stored)
            with bar.external_write_mode():
                show(row(found[op.name], width))
            if options.autotune and path is not None and search.decided:
                stored = write_tiles(path, name, search.table, set(search.decided))
            if keep := getattr(options, "keep", None):  # a run that is cut short keeps what it measured
                keep(result())
            bar.update()
    whole = result()
    for line in closing(options, setup, path, search, stored, whole["left_out"]):
        show(line)
    return whole


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """Of the engine that is tuned for: with adapters unless --no-enable-lora; no weights are read. Raises: ConfigError."""
    if options.lora_modules:
        raise ConfigError(
            "--lora-modules: the kernels are timed with random adapters; give --max-lora-rank and --max-loras"
        )
    return engine_args_from(options, enable_lora=options.enable_lora is not False, load_format="dummy")


def buckets(sizes: Sequence[int] | None, known: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the scheduler that batches of these sizes run in, in that order; None: all, the largest first.
    Raises: ConfigError."""
    if sizes is None:
        return known[::-1]
    if max(sizes) > known[-1]:
        raise ConfigError(
            f"--batch-size: a batch of {max(sizes)} rows does not run at once with --max-num-seqs {known[-1]}"
        )
    return tuple(dict.fromkeys(next(b for b in known if b >= size) for size in sizes))


def chosen(ops: list[LayerOp], only: list[str] | None) -> list[LayerOp]:
    """Raises: ConfigError for a name that fits nothing."""
    for part in only or ():
        if not any(part in op.name for op in ops):
            raise ConfigError(
                f"--only {part}: no op has that in its name; there are\n  " + "\n  ".join(o.name for o in ops)
            )
    return [op for op in ops if only is None or any(part in op.name for part in only)]


# ---- the search ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Search:
    """table: what was found to be better so far; decided: all keys that were looked at. deadline: of time.perf_counter."""

    setup: DeviceSetup
    rounds: int
    deadline: float
    table: TileTable = dataclasses.field(default_factory=TileTable)
    decided: dict[Key, None] = dataclasses.field(default_factory=dict)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block may have, or fewer."""
        text = str(getattr(self.setup.device, "compute_capability", "0.0"))
        return SHARED.get(tuple(int(part) for part in text.split(".")), SMALLEST_CARD)

    def compare(self, op: LayerOp, stored: TileTable) -> Found:
        """With the rules' tiles, and with the stored ones where they differ."""
        programs = Programs(op, self.setup, TileTable())
        own = {key: stored.get(key) for key in programs.keys if stored.get(key) not in (None, heuristic(key))}
        ready = programs.compile([TileTable(), *([TileTable.of(own)] if own else [])])
        seconds, bound = self._seconds(ready, self.rounds)
        return Found(op, seconds[TileTable()], seconds.get(TileTable.of(own)) if own else None, own, host_bound=bound)

    def tune(self, op: LayerOp) -> Found:
        """Adds to the table what is better. Keys that an earlier op has decided stay as they are."""
        programs = Programs(op, self.setup, self.table)
        keys = [key for key in programs.keys if key.rule in op.rules and key not in self.decided]
        begin = best = self.table
        matter = keys
        for _ in range(PASSES):
            around = {
                key: [TileTable.of({**best.by_key, key: t}) for t in self._neighbours(key, best)] for key in matter
            }
            fastest = self._fastest(programs.compile([best, *itertools.chain.from_iterable(around.values())]))
            matter = [key for key, tables in around.items() if any(table not in programs.same for table in tables)]
            best, before = fastest, best
            if best == before or time.perf_counter() > self.deadline:
                break
        ready = programs.compile([begin, best])
        seconds, bound = self._seconds(ready, self.rounds)
        better = best != begin and not bound and seconds[best] < (1 - GAIN) * seconds[begin]
        tiles = {key: best.get(key) for key in keys if best.get(key) != begin.get(key)} if better else {}
        self.table = best if better else begin
        self.decided |= dict.fromkeys(keys)
        return Found(
            op,
            seconds[begin],
            seconds[best] if better else None,
            tiles,
            len(programs.tried) - len(programs.same) - 1,
            len(programs.failed),
            bound,
        )

    def _neighbours(self, key: Key, table: TileTable) -> list[Any]:
        return candidates(key, table.get(key), self.shared)

    def _fastest(self, ready: dict[TileTable, timing.TimedProgram]) -> TileTable:
        seconds, _ = self._seconds(ready, FIRST_ROUNDS)
        least = min(seconds.values())
        hopeful = {table: ready[table] for table, s in seconds.items() if s <= HOPELESS * least}
        if len(hopeful) > 1:
            seconds, _ = self._seconds(hopeful, self.rounds)
        return min(hopeful, key=seconds.__getitem__)

    def _seconds(self, ready: dict[TileTable, timing.TimedProgram], rounds: int) -> tuple[dict[TileTable, float], bool]:
        """(median seconds of a call, whether the host was too slow in any round)."""
        times = alternate({table: timed.round for table, timed in ready.items()}, ready, rounds)
        bound = any(t.host_bound for taken in times.values() for t in taken)
        return {table: statistics.median(t.seconds for t in taken) for table, taken in times.items()}, bound


class Programs:
    """Of one op, by the table that they were traced with. keys: what the op asks the rules. tried, same, failed: tables, of those
    what did not change the program, and what did not compile or gave other numbers."""

    def __init__(self, op: LayerOp, setup: DeviceSetup, table: TileTable):
        self._op, self._setup, self._calls = op, setup, op.calls(setup.is_gpu)
        rotation = timing.GPU_ROTATION if setup.is_gpu else timing.CPU_ROTATION
        self._ready: dict[TileTable, timing.TimedProgram] = {}
        self._wanted: list[np.ndarray] | None = None
        self._texts: set[str] = set()
        self.tried: dict[TileTable, None] = {}
        self.same: dict[TileTable, None] = {}
        self.failed: dict[TileTable, str] = {}
        with jax.default_device(setup.device), tiles_in_use(table):
            self._given = op.operands(rotation, self._calls)
        seen = Recorder(table)
        with tiles_in_use(seen):
            group = tuple(self._given.rotating[: self._calls])
            jax.eval_shape(op.program(), self._given.fixed, group, self._given.carry)
        self.keys = list(seen.keys)

    def compile(self, tables: list[TileTable]) -> dict[TileTable, timing.TimedProgram]:
        """Those of the tables whose programs compile, are not another's, and give what the first table's program gives, which must
        compile. Raises what its compilation raises."""
        jobs = {}
        with ThreadPoolExecutor(os.cpu_count() or 2, thread_name_prefix="compile") as pool:
            for table in dict.fromkeys(tables):
                if table not in self.tried and (lowered := self._lowered(table)) is not None:
                    jobs[table] = pool.submit(timing.compiled, lowered, self._setup)
                self.tried.setdefault(table)
            for table, job in jobs.items():
                try:
                    made = job.result()
                except Exception as e:
                    if self._wanted is None:
                        raise
                    self.failed[table] = str(e)[:200]
                else:
                    self._add(table, made)
        return {table: self._ready[table] for table in dict.fromkeys(tables) if table in self._ready}

    def _lowered(self, table: TileTable) -> Any:
        """None for a program that is there already: a table need not change what an op computes, or how."""
        with jax.default_device(self._setup.device), tiles_in_use(table):
            lowered = timing.lowered(self._op.program(), self._given, self._calls)
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if text in self._texts:
            self.same[table] = None
            return None
        self._texts.add(text)
        return lowered

    def _add(self, table: TileTable, made: Any) -> None:
        timed = timing.TimedProgram(made, self._given, self._setup, self._calls)
        numbers = settled(timed.results[0])
        if self._wanted is None:
            self._wanted = numbers
        if agree(numbers, self._wanted, self._op.spec.dtype):
            self._ready[table] = timed
        else:
            self.failed[table] = "other numbers"


def agree(got: list[np.ndarray], want: list[np.ndarray], dtype: Any) -> bool:
    """Whether they differ by no more than another order of sums can make."""
    tolerance = max(4 * float(jnp.finfo(dtype).eps), 1e-5)
    return all(
        np.isfinite(g).all() and np.abs(g - w).max() <= tolerance * np.abs(w).max()
        for g, w in zip(got, want, strict=True)
    )


def heuristic(key: Key) -> Any:
    return RULES[key.rule](**named(key))


# ---- what is shown ---------------------------------------------------------------------------------------------------
def heading(autotune: bool, setup: DeviceSetup, path: Path | None, stored: TileTable, width: int) -> list[str]:
    columns = f"{'MB to read':>11}{'heuristic us':>14}{'GB/s':>8}{'tuned us':>12}{'GB/s':>8}{'gain':>7}  tiles"
    lines = [f"{'one call':<{width}}{columns}"]
    if setup.implementation != "triton":
        lines.insert(0, "Plain JAX runs on this device: it has no tiles, so there is nothing to tune.")
    elif not autotune:
        there = "no compile cache" if path is None else path
        lines.insert(0, f"Measured tiles of this card and version: {len(stored.entries)} entries in {there}")
    return lines


def row(found: Found, width: int) -> str:
    """One line of the table; "*" marks times that the host's work is part of."""
    one = found.as_dict()
    text = f"{found.op.name:<{width}}{one['bytes'] / 1e6:>11.2f}{one['heuristic_us']:>13.2f}"
    text += f"{'*' if found.host_bound else ' '}{one['heuristic_gb_per_second']:>8,.0f}"
    if found.tuned is None:
        return text + f"{'-':>12}{'-':>8}{'-':>7}"
    text += f"{one['tuned_us']:>12.2f}{one['tuned_gb_per_second']:>8,.0f}{1 - found.tuned / found.seconds:>7.1%}"
    return text + "  " + "; ".join(difference(key, tiles) for key, tiles in found.tiles.items())


def difference(key: Key, tiles: Any) -> str:
    """What is not as the rule has it."""
    own, other = dataclasses.asdict(heuristic(key)), dataclasses.asdict(tiles)
    changes = [f"{name} {own[name]}->{value}" for name, value in other.items() if value != own[name]]
    return f"{key.rule.removesuffix('_tiles')}: {', '.join(changes)}"


def closing(
    options: Any, setup: DeviceSetup, path: Path | None, search: Search, stored: TileTable, left_out: list[str]
) -> list[str]:
    lines = []
    if left_out:
        lines.append(
            f"--max-seconds {options.max_seconds} are over: {len(left_out)} ops were not reached, from {left_out[0]} on"
        )
    if options.autotune and setup.implementation == "triton":
        found = f"{len(search.table.entries)} of {len(search.decided)} choices are better by more than {GAIN:.0%}"
        if path is None:
            lines.append(f"{found}; not stored, as there is no compile cache")
        else:
            lines.append(
                f"{found}; {path} holds {len(stored.entries)} for this card, which engines use from their next start"
            )
    return lines
