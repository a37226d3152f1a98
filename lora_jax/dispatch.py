"""The dispatch table: compiled executables by key. Knows jax only; no model, no scheduler. Only this file compiles.

An executable refuses a wrong shape instead of compiling again, so after warm-up nothing can compile in the path of a request;
`compilations()` counts every backend compilation of the process, from whatever source, to prove it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import monitoring

from .errors import StepKeyError

_compilations = 0


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compilations
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations += 1


monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """Backend compilations of this process so far, cache hits included."""
    return _compilations


@dataclass(frozen=True)
class Entry:
    """One function to compile. args: pytrees of `jax.ShapeDtypeStruct` (positional). donate: positions given up by the caller.

    wave: entries of a lower wave compile first, so that what they autotune is reused by later ones.
    """

    fn: Callable
    args: tuple
    donate: tuple[int, ...] = ()
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    wave: int = 0


@dataclass
class _Row:
    compiled: Any
    compile_seconds: float
    hits: int = 0

    @functools.cached_property
    def program_hash(self) -> str:  # kept: the text of a program is long
        return program_hash(self.compiled)


# What differs between two compilations of one program: names, source lines and tables of them.
_NOISE = re.compile(
    r"(, metadata=\{[^}]*\}|, stack_frame_id=\d+|fingerprint_before_lhs=\"[^\"]*\"|^HloModule [^,\n]*"
    r"|^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d.*\n)*)",
    re.MULTILINE,
)
_HEADER = re.compile(r"^((?:ENTRY )?%\S+) \(.*\{$", re.MULTILINE)  # repeats the parameters that stand below it
_NAME = re.compile(r"%[\w.\-]+")


def program_hash(compiled: Any) -> str:
    """Hash of the optimized program without module name, metadata and source lines; its values are numbered, as their names
    come from those of arguments."""
    text = re.sub(r"\"[^\"]*_step[^\"]*\"", "", _NOISE.sub("", compiled.as_text()))
    numbers: dict[str, str] = {}
    text = _NAME.sub(lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), _HEADER.sub(r"\1 {", text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class StepTable:
    """Executables by key; a miss raises StepKeyError. `table[key](*args)` runs one and counts the hit."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, _Row] = {}

    @classmethod
    def build(
        cls,
        entries: Mapping[Any, Entry],
        *,
        mesh: jax.sharding.Mesh | None = None,
        matmul_precision: str | None = None,
        threads: int = 4,
        progress: Callable[[Hashable], None] = lambda key: None,
    ) -> StepTable:
        """Lower every entry and compile in parallel threads; progress(key) is called as each is done.

        Mesh and matmul precision are thread-local in JAX, so each worker enters them. Raises what a compilation raises.
        """
        table = cls()

        def compile_one(key: Hashable, entry: Entry) -> None:
            start = time.perf_counter()
            with contextlib.ExitStack() as stack:
                if mesh is not None:
                    stack.enter_context(jax.set_mesh(mesh))
                if matmul_precision is not None:
                    stack.enter_context(jax.default_matmul_precision(matmul_precision))
                lowered = jax.jit(entry.fn, donate_argnums=entry.donate).lower(*entry.args)
                compiled = lowered.compile(compiler_options=dict(entry.compiler_options) or None)
            table._rows[key] = _Row(compiled, time.perf_counter() - start)
            progress(key)

        for wave in sorted({e.wave for e in entries.values()}):
            with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
                jobs = [pool.submit(compile_one, k, e) for k, e in entries.items() if e.wave == wave]
                try:
                    for job in jobs:
                        job.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        table._rows = {key: table._rows[key] for key in entries}  # report in the order of the keys
        return table

    def __getitem__(self, key: Hashable) -> Callable:
        row = self._rows.get(key)
        if row is None:
            raise StepKeyError(f"no executable for {key}; the table holds {', '.join(map(str, self._rows))}")
        row.hits += 1
        return row.compiled

    def reset_hits(self) -> None:
        """Forget what warm-up ran."""
        for row in self._rows.values():
            row.hits = 0

    def __len__(self) -> int:
        return len(self._rows)

    def keys(self) -> list[Any]:
        return list(self._rows)

    def compiled(self, key: Hashable) -> Any:
        """The executable itself, without counting a hit."""
        return self._rows[key].compiled

    def temp_bytes(self) -> int:
        """Largest temporary allocation of any executable; they run one after another."""
        return max((_temp_bytes(r.compiled) for r in self._rows.values()), default=0)

    def report(self) -> list[dict[str, Any]]:
        """One dict a key: key, compile_seconds, temp_bytes, program_hash, hits."""
        return [
            dict(
                key=str(key),
                compile_seconds=round(row.compile_seconds, 3),
                temp_bytes=_temp_bytes(row.compiled),
                program_hash=row.program_hash,
                hits=row.hits,
            )
            for key, row in self._rows.items()
        ]


def _temp_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
