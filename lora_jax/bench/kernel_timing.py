"""The time of one kernel on the device, and of nothing else.

A compiled program makes many calls in a row, each on other weights or pages, so that none lie in a cache; several programs
are started before the first is waited for, so that the host's work hides behind the device's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.kernels import lora_expand, lora_shrink
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.cases import AttentionCase, Case
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.lora_layout import padded_rank
from lora_jax.kernels.tuned import RULES, Key, TileTable, tiles_in_use

from ..device import DeviceSetup, compiler_options

GPU_ROTATION, CPU_ROTATION = 256 << 20, 64 << 20  # bytes read before any is read again: a multiple of the last cache
MAX_IN_FLIGHT = 16  # programs; the runtime makes the host wait from 32 on
MAX_LAYERS = 4096
GPU_ROUND, CPU_ROUND = 5e-3, 20e-3  # seconds that one timing should last at least
IN_ORDER: dict[str, object] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}  # one call after the other
HOST_BOUND = 0.8  # share of a round's time that starting the programs may take


@dataclass(frozen=True)
class Operands:
    """What an op works on. fixed: the same in every call. rotating: one entry a call, one after the other. carry: what calls
    write in place (expand's y, attention's pages), in a list that both implementations take it from and put it back into."""

    fixed: Any
    rotating: Sequence[Any]
    carry: list[jax.Array]


@dataclass(frozen=True)
class Timing:
    """seconds a call; host_bound: the host was too slow to keep the device busy, so the device alone is faster."""

    seconds: float
    host_bound: bool


def values(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """Cheap numbers in [-0.05, 0.05): a hash of the index. (Zeros would let a card draw less power, and run faster.)"""
    return _hashed(jnp.uint32(seed), shape=shape, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _hashed(start: jax.Array, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    i = jax.lax.iota(jnp.uint32, prod(shape)) * jnp.uint32(2654435761) + start
    i = (i ^ (i >> 15)) * jnp.uint32(2246822519)
    return (((i >> 16).astype(jnp.float32) / 65536 - 0.5) * 0.1).astype(dtype).reshape(shape)


def _repeats(wanted: int, each: int, limit: int) -> int:
    return max(1, min(-(-wanted // max(each, 1)), limit)) if each else 1


def must_read(op: str, case: Any) -> int:
    """Bytes of weights, or of keys and values, that one call has to fetch. The rows themselves are small and stay cached.

    Raises: ValueError for an op that does not exist.
    """
    itemsize = np.dtype(jnp.dtype(case.dtype)).itemsize
    if op == "attention":
        seen = case.pages * case.page_size if case.window is None else min(case.pages * case.page_size, case.window)
        return case.rows * seen * 2 * case.kv_heads * case.head_dim * itemsize
    ids = case.slot_ids()
    return len(set(ids[ids >= 0].tolist())) * prod(_adapter_shape(op, case)) * itemsize


def _adapter_shape(op: str, case: Case) -> tuple[int, int]:
    """Of one adapter's A or B."""
    rank = padded_rank(case.rank)
    if op == "shrink":
        return len(case.linear.slices) * rank, case.linear.inputs
    if op == "expand":
        return rank, sum(case.linear.slices)
    raise ValueError(f"op must be shrink, expand or attention, got {op!r}")


def operands(op: str, case: Any, implementations: Sequence[str], rotation: int, calls: int) -> dict[str, Operands]:
    """implementation -> operands; weights and pages are the same arrays. rotation: bytes to read before any is read again.
    calls: the number of rotating entries is a multiple of it."""
    copies = _repeats(rotation, must_read(op, case), MAX_LAYERS)
    numbers = [i % copies for i in range(-(-copies // calls) * calls)]
    if op == "attention":
        return dict.fromkeys(implementations, _attention(case, copies, numbers))
    weights = values((copies, case.slots, *_adapter_shape(op, case)), case.dtype, 1)
    ids, layers = jnp.asarray(case.slot_ids()), [jnp.int32(i) for i in numbers]
    x = values((case.rows, case.linear.inputs), case.dtype, 2)
    if op == "shrink":
        return dict.fromkeys(implementations, Operands((x, weights, ids), layers, []))
    y = [values((case.rows, sum(case.linear.slices)), case.dtype, 3)]
    a = jax.ShapeDtypeStruct((1, case.slots, *_adapter_shape("shrink", case)), x.dtype)
    out = {}
    for name in implementations:  # each makes its own number of partial sums
        shape = jax.eval_shape(functools.partial(lora_shrink, implementation=name), x, a, ids, layers[0]).shape
        out[name] = Operands((values(shape, "float32", 4), weights, ids), layers, y)
    return out


def _attention(case: AttentionCase, copies: int, numbers: Sequence[int]) -> Operands:
    """Full contexts, in pages scattered over a pool that holds `copies` batches."""
    pages = np.random.default_rng(0).permutation(copies * case.rows * case.pages).astype(np.int32)
    tables = [jnp.asarray(t) for t in pages.reshape(copies, case.rows, case.pages)]
    kv = values((pages.size, case.page_size, 2, case.kv_heads, case.head_dim), case.dtype, 1)
    qkv = values((case.rows, (case.heads + 2 * case.kv_heads) * case.head_dim), case.dtype, 2)
    angles = values((case.rows, case.head_dim // 2), "float32", 3)
    positions = jnp.full((case.rows,), case.pages * case.page_size - 1, jnp.int32)
    arrivals = new_arrivals(case.rows * case.kv_heads)
    return Operands((qkv, (jnp.cos(angles), jnp.sin(angles)), positions), [tables[i] for i in numbers], [kv, arrivals])


def _call(op: str, case: Any, implementation: str) -> Callable[..., tuple[Any, list[jax.Array]]]:
    """(fixed, rotating entry, carry) -> (result, carry). Jitted, so that all calls share one kernel."""
    how: dict[str, Any] = dict(implementation=implementation)
    if op == "shrink":
        return jax.jit(lambda f, layer, carry: (lora_shrink(f[0], f[1], f[2], layer, **how), carry))
    if op == "expand":
        how["slices"] = case.linear.slices
        return jax.jit(lambda f, layer, carry: (None, [lora_expand(carry[0], f[0], f[1], f[2], layer, **how)]))
    how |= dict(heads=case.heads, scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap)

    def attend(f, table, carry):
        out, *carry = decode_attention(f[0], f[1], carry[0], table, f[2], carry[1], **how)
        return out, carry

    return jax.jit(attend)


def asks_for(op: str, case: Any, tiles: TileTable | None) -> bool:
    """Whether the table has tiles for attention of this case that are not its rule's own."""
    if op != "attention" or tiles is None:
        return False
    group, context = case.heads // case.kv_heads, case.pages * case.page_size
    itemsize = np.dtype(jnp.dtype(case.dtype)).itemsize
    key = Key("attention_tiles", (case.rows, case.kv_heads, group, context, case.head_dim, itemsize))
    return tiles.get(key) not in (None, RULES[key.rule](*key.arguments))


def looped(op: str, case: Any, implementation: str) -> Any:
    """A jitted (fixed, rotating entries, carry) -> (every call's result, carry); the carry is donated."""
    call = _call(op, case, implementation)

    def program(fixed, entries, carry):
        outs = []
        for entry in entries:
            if outs and not carry:  # in this order: neither merged nor side by side
                fixed, outs[-1] = jax.lax.optimization_barrier((fixed, outs[-1]))
            out, carry = call(fixed, entry, carry)
            outs.append(out)
        return outs, carry

    return jax.jit(program, donate_argnums=2)


class TimedProgram:
    """A compiled (fixed, rotating entries, carry) -> (results, carry) of `calls` calls, ready to be timed round by round."""

    def __init__(self, program: Any, given: Operands, setup: DeviceSetup, calls: int):
        self._program, self._fixed, self._carry = program, given.fixed, given.carry
        self._groups = [tuple(given.rotating[i : i + calls]) for i in range(0, len(given.rotating), calls)]
        self._next, self._calls, self._at_once = 0, calls, 1
        self._on_gpu = setup.is_gpu
        self._last: Any = None
        self._start(1)
        jax.block_until_ready((self._last, self._carry))

    def _start(self, programs: int) -> None:
        for _ in range(programs):
            self._last, self._carry[:] = self._program(self._fixed, self._groups[self._next], self._carry)
            self._next = (self._next + 1) % len(self._groups)

    @property
    def results(self) -> Any:
        """Of every call of the last program."""
        return self._last

    def finite(self) -> bool:
        """Whether all that the last program gave is finite: its results, or what it wrote where it has none."""
        return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(self._last) or self._carry)

    def calibrate(self) -> None:
        """Decides how many programs one round takes."""
        once = self.round().seconds * self._calls
        wanted = (GPU_ROUND if self._on_gpu else CPU_ROUND) / once
        self._at_once = max(1, min(MAX_IN_FLIGHT, round(wanted)))

    def round(self, clock: Callable[[], float] = time.perf_counter) -> Timing:
        """One timing, after nothing else is under way."""
        begin = clock()
        self._start(self._at_once)
        started = clock() - begin
        jax.block_until_ready((self._last, self._carry))
        total = clock() - begin
        # A CPU is its own host; and where one program alone is started, its start says nothing.
        tells = self._on_gpu and self._at_once > 1
        return Timing(total / self._at_once / self._calls, tells and started > HOST_BOUND * total)


def lowered(program: Any, given: Operands, calls: int) -> Any:
    """A jitted program for the shapes of its operands."""
    return program.lower(given.fixed, tuple(given.rotating[:calls]), given.carry)


def compiled(program: Any, setup: DeviceSetup) -> Any:
    """A lowered program, its calls one after the other."""
    options = dict(compiler_options(setup, True, None)) | (IN_ORDER if setup.is_gpu else {})
    return program.compile(compiler_options=options)


class Timed(TimedProgram):
    """One op of one implementation. tiles: a table of measured ones."""

    def __init__(
        self,
        op: str,
        case: Any,
        implementation: str,
        given: Operands,
        setup: DeviceSetup,
        calls: int,
        tiles: TileTable | None = None,
    ):
        with tiles_in_use(tiles):
            program = compiled(lowered(looped(op, case, implementation), given, calls), setup)
        super().__init__(program, given, setup, calls)
