"""Products with adapters inside against float64, for tests of the interpreted, the plain-JAX and, on a GPU, the compiled form.

Each `check_` raises AssertionError that tells what is wrong. Calls of one `Case` share a compiled program, whatever their rows,
slots and layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lora_jax.kernels.adapters import LINE, Adapters, adapter_counters
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.deferred_norm import DeferredNorm
from lora_jax.kernels.lora_items import FIELDS, ITEM, most_items, work_items
from lora_jax.kernels.residual_matmul import residual_matmul
from lora_jax.kernels.skinny_matmul import skinny_lora_matmul
from lora_jax.kernels.swiglu import lora_swiglu

from . import kernel_checks as checks
from . import lora_oracle
from .fused_tiles import tiles_of

PIECES = 64  # counters of a residual product, for the widest here; more than the others need
OPS = ("skinny", "residual", "swiglu")  # as linears of a layer, in this order
# Of h as it is multiplied with B: high and low part of 8 or 11 bits each, or float32.
H_ROUNDING = {"bfloat16": 2.0**-17, "float16": 2.0**-22, "float32": lora_oracle.SUMS}


@dataclass(frozen=True)
class Case:
    """Shapes of one call. blocks: of the squares of a DeferredNorm, None for an array. ranks: for each linear those of the
    slots, 0: none."""

    op: str
    rows: int
    inputs: int
    slices: tuple[int, ...]
    dtype: str
    blocks: int | None = None
    ranks: tuple[tuple[int, ...], ...] = ((64, 33, 5, 16, 0, 1), (33, 64, 1, 0, 16, 5), (5, 16, 33, 1, 64, 0))
    padded_rank: int = 64
    layers: int = 3

    @property
    def id(self) -> str:
        kind = "array" if self.blocks is None else "norm"
        return f"{self.op}-{self.rows}x{self.inputs}x{self.outputs}-r{self.padded_rank}-{self.dtype}-{kind}"

    @property
    def linear(self) -> int:
        return OPS.index(self.op)

    @property
    def own_ranks(self) -> tuple[int, ...]:
        return self.ranks[self.linear]

    @property
    def outputs(self) -> int:
        return sum(self.slices)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "w", "adapters", "residual", "scale"],
    meta_fields=["case"],
)
@dataclass(frozen=True)
class Given:
    """Operands. residual, scale: of the residual product, else None."""

    case: Case
    x: np.ndarray | DeferredNorm
    w: np.ndarray
    adapters: Adapters
    residual: np.ndarray | None = None
    scale: np.ndarray | None = None

    @property
    def active(self) -> np.ndarray:
        """bool [R]: rows to which this linear adds something."""
        ids = np.asarray(self.adapters.slot_ids)
        return (ids >= 0) & (np.array(self.case.own_ranks)[ids] > 0)


# ---- operands --------------------------------------------------------------------------------------------------------
@functools.lru_cache(8)
def _weights(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """a and b of all slots and layers, zeros above each rank. Those of the residual product are multiples of 1/8."""
    rng, slots, slices = np.random.default_rng(seed), len(case.own_ranks), len(case.slices)
    stack, kind = (case.layers, slots), checks.oracle.numpy_dtype(case.dtype)

    def values(scale: float, *shape: int) -> np.ndarray:
        normal = rng.standard_normal(1_000_003, np.float32)  # a prime number, repeated: no two adapters are alike
        return np.resize((checks.grid(normal) if case.op == "residual" else scale * normal).astype(kind), shape)

    own = np.arange(case.padded_rank) < np.array(case.own_ranks)[:, None]
    a = values(1.0, *stack, slices, case.padded_rank, case.inputs) * own[:, None, :, None].astype(kind)
    b = values(0.25 if case.op == "swiglu" else 4.0, *stack, case.padded_rank, case.outputs)
    return a.reshape(*stack, -1, case.inputs), b * own[:, :, None].astype(kind)


def adapters_of(case: Case, slot_ids: Sequence[int], layer: int, slots: Sequence[int] | None, seed: int) -> Adapters:
    """slots: those in use, in the order in which they are worked off; None: as the rows name them."""
    if slots is None:
        slots = tuple(dict.fromkeys(s for s in slot_ids if s >= 0))
    room = most_items(len(case.own_ranks), case.padded_rank)
    items = work_items(slots, np.array(case.ranks), case.padded_rank, room)
    ids = np.array(slot_ids, np.int32)
    return Adapters(*_weights(case, seed), ids, items, np.int32(layer), case.slices, case.linear)


def make(
    case: Case, slot_ids: Sequence[int], layer: int = 0, *, slots: Sequence[int] | None = None, seed: int = 0
) -> Given:
    """x ~ 1 (of swiglu: products ~ 1) and w do not depend on the seed, which is that of the adapters."""
    assert len(slot_ids) == case.rows
    adapters = adapters_of(case, slot_ids, layer, slots, seed)
    if case.op == "residual":
        y, w, x, scale = checks.residual_operands(case.rows, case.inputs, case.outputs, case.dtype)
        return Given(case, y, w, adapters, x, scale)
    x, w = checks.matmul_operands(case.rows, case.inputs, case.outputs, case.dtype)
    size = case.inputs**-0.5 if case.op == "swiglu" else 1.0
    return Given(
        case, (x * size).astype(x.dtype) if case.blocks is None else checks.deferred(x, case.blocks, size), w, adapters
    )


def counters(case: Case) -> np.ndarray:
    items = np.zeros((len(case.ranks), most_items(len(case.own_ranks), case.padded_rank) * FIELDS), np.int32)
    return np.zeros(PIECES + adapter_counters(items, case.layers), np.int32)


def call(given: Given, form: str, arrivals: Any) -> tuple[Any, Any]:
    """(float32 [S, R, N], gated [R, N / 2] or (total, norm); arrivals for the next)."""
    x, w, adapters, options = given.x, given.w, given.adapters, checks.how(form)
    if given.case.op != "residual":
        op = skinny_lora_matmul if given.case.op == "skinny" else lora_swiglu
        return op(x, w, adapters, arrivals, **options)
    operands = x, w, given.residual, given.scale, arrivals
    total, norm, arrivals = residual_matmul(*operands, eps=checks.EPS, adapters=adapters, **options)
    return (total, norm), arrivals


def run(given: Given, form: str, arrivals: np.ndarray | None = None) -> tuple[Any, np.ndarray]:
    """`call` as numpy arrays. Nothing is donated."""
    with jax.default_matmul_precision("highest"):
        found = call(given, form, counters(given.case) if arrivals is None else arrivals)
    return jax.tree.map(np.asarray, found)


# ---- what must come out ----------------------------------------------------------------------------------------------
def _columns(case: Case) -> tuple[np.ndarray, tuple[int, ...]]:
    """Some columns, of swiglu the same of both halves, and how many of each slice they are."""
    if case.op == "swiglu":
        half = checks.some(case.outputs // 2)
        columns = np.concatenate([half, case.outputs // 2 + half])
    else:
        columns = checks.some(case.outputs)
    ends = np.searchsorted(columns, [0, *np.cumsum(case.slices)])
    return columns, tuple(int(n) for n in np.diff(ends))


@dataclass(frozen=True)
class Wrong:
    """A way to be wrong that the bounds must tell. ids: slots of the rows."""

    ids: np.ndarray
    layer: int
    lost: bool = False  # of each slot the last item
    rounded: bool = False  # h to bfloat16


def _delta(given: Given, columns: np.ndarray, widths: tuple[int, ...], how: Wrong) -> tuple[np.ndarray, np.ndarray]:
    """What adapters add in these columns, and the bound of its error: float64 [R, C]."""
    case, x = given.case, checks.exact(given.x)
    value, off = np.zeros((2, len(x), len(columns)))
    for slot in sorted(set(how.ids[how.ids >= 0].tolist())):
        a = np.asarray(given.adapters.a[how.layer, slot]).astype(np.float64)
        b = np.asarray(given.adapters.b[how.layer, slot])[:, columns].astype(np.float64)
        if how.lost:
            b[(case.own_ranks[slot] - 1) // ITEM * ITEM :] = 0
        rounded = checks.oracle.numpy_dtype("bfloat16") if how.rounded else None
        for row in np.flatnonzero(how.ids == slot):
            value[row], off[row] = lora_oracle.delta(
                x[row], a, b, case.padded_rank, widths, H_ROUNDING[case.dtype], rounded
            )
    return value, off


def _product(given: Given, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x @ w, and the bound of its error."""
    x, w = checks.exact(given.x), given.w[:, columns].astype(np.float64)
    return x @ w, checks.PRODUCT_BOUND * (np.abs(x) @ np.abs(w))


def _wrongs(given: Given) -> dict[str, Wrong]:
    ids, layer, case = np.asarray(given.adapters.slot_ids), int(given.adapters.layer), given.case
    others = [slot for slot, rank in enumerate(case.own_ranks) if rank] * 2
    following = np.array([others[others.index(s) + 1] if s in others else s for s in ids])
    wrongs = {"another slot": Wrong(following, layer), "a lost item": Wrong(ids, layer, lost=True)}
    wrongs |= {"another layer": Wrong(ids, (layer + 1) % case.layers)} if case.layers > 1 else {}
    # the result of the others is rounded to bfloat16 itself
    tells = case.op == "skinny" or case.dtype == "float32"
    return wrongs | ({"h in bfloat16": Wrong(ids, layer, rounded=True)} if tells else {})


def _beyond(given: Given, out: Any, columns: np.ndarray, product: np.ndarray, off: np.ndarray) -> np.ndarray:
    """bool [R, C]: where out is not that product within its error, or no number."""
    case = given.case
    if case.op == "skinny":
        assert out.dtype == np.float32 and out.shape[1:] == (case.rows, case.outputs)
        return ~(np.abs(out[..., columns].astype(np.float64).sum(0) - product) <= off)
    if case.op == "swiglu":
        assert out.dtype == given.w.dtype and out.shape == (case.rows, case.outputs // 2)
        halves, offs = np.split(product, 2, 1), np.split(off, 2, 1)
        error, bound = checks.gated_error(out[:, columns[: len(columns) // 2]], halves, offs, case.dtype)
        return ~(error <= bound)
    assert given.residual is not None
    total, before = out[0][:, columns], given.residual[:, columns]
    want = checks.added(before, product)
    assert total.dtype == want.dtype
    return total != want


def check_result(given: Given, out: Any, form: str) -> None:
    """Against float64, with a bound that tells all of `_wrongs`. The residual product is exact before it is rounded."""
    columns, widths = _columns(given.case)
    right = Wrong(np.asarray(given.adapters.slot_ids), int(given.adapters.layer))
    (base, off), (delta, delta_off) = _product(given, columns), _delta(given, columns, widths, right)
    off = off + delta_off
    beyond = _beyond(given, out, columns, base + delta, off)
    assert not beyond.any(), f"wrong: {beyond.mean(1)} of the rows' columns, slots {right.ids}"
    if given.case.op == "residual":
        checks.check_next_norm(*out, given.scale, given.case.dtype, form)
    for name, wrong in _wrongs(given).items() if given.active.any() else ():
        product = base + _delta(given, columns, widths, wrong)[0]
        told = _beyond(given, out, columns, product, off)[given.active]
        assert (told.mean(1) > 0.4).all() or (wrong.rounded and told.mean() > 0.1), f"the bound does not tell {name}"


def check_counters(given: Given, after: np.ndarray, form: str, before: np.ndarray | None = None) -> int | None:
    """Counters are as they were, but for the one of this linear in this layer, which had not counted and is returned: there each
    pass over the items came in all its parts. None: there was nothing to count."""
    before, items = counters(given.case) if before is None else before, given.adapters.items
    changed, number = np.flatnonzero(after != before), int(items[given.case.linear, -(items.shape[1] // FIELDS)])
    if form == "xla" or number == 0:
        assert not changed.size, changed
        return None
    assert changed.size == 1 and changed[0] >= PIECES, changed
    at = int(changed[0])
    assert before[at] == 0 and after[at] == _arrivals(given.case, number), (at, before[at], after[at], number)
    return at


def _arrivals(case: Case, number: int) -> int:
    """How often programs come, for so many items."""
    room, itemsize = most_items(len(case.own_ranks), case.padded_rank), checks.oracle.numpy_dtype(case.dtype).itemsize
    tiles = tiles_of(case.op, case.rows, case.inputs, case.slices, room, case.padded_rank, itemsize)
    return -(-number // tiles.items) * (1 if tiles.joined else tiles.parts)


def check(given: Given, form: str) -> Any:
    """Returns the result."""
    out, after = run(given, form)
    check_result(given, out, form)
    check_counters(given, after, form)
    return out


# ---- bits ------------------------------------------------------------------------------------------------------------
def row_bits(out: Any, rows: Any) -> list[bytes]:
    """Of some rows, in all results."""
    if not isinstance(out, tuple):
        return [out[..., rows, :].tobytes()]
    total, norm = out
    return [v[..., rows, :].tobytes() for v in (total, norm.scaled, norm.squares[..., None])]


def finite_rows(out: Any) -> np.ndarray:
    """bool [R]."""
    first = out[0] if isinstance(out, tuple) else out
    finite = np.isfinite(first.astype(np.float64)).all(-1)
    return finite.all(0) if finite.ndim > 1 else finite


def with_x(given: Given, change: Callable[[np.ndarray], None]) -> Given:
    """x, of a DeferredNorm what is scaled, after `change` has written to a copy."""
    values = (given.x.scaled if isinstance(given.x, DeferredNorm) else given.x).copy()
    change(values)
    x = dataclasses.replace(given.x, scaled=values) if isinstance(given.x, DeferredNorm) else values
    return dataclasses.replace(given, x=x)


def alone(given: Given, row: int) -> Given:
    """NaN in all other rows."""

    def clear(x: np.ndarray) -> None:
        x[np.arange(len(x)) != row] = np.nan

    out = with_x(given, clear)
    if given.residual is None:
        return out
    residual = given.residual.copy()
    clear(residual)
    return dataclasses.replace(out, residual=residual)


def check_row_bits(case: Case, form: str, row: int, slot: int) -> None:
    """The row's bits, whatever other rows hold, which slots are in use, in which order, what lies in them and in which layer of
    them and in which slot its adapter lies."""
    slots = len(case.own_ranks)
    ids = [slot if t == row else t % (slots + 1) - 1 for t in range(case.rows)]
    first = make(case, ids, 0, slots=range(slots))
    want = row_bits(run(first, form)[0], row)
    only = [slot if t == row else -1 for t in range(case.rows)]
    variants = {
        "other rows": alone(first, row),
        "no other slot in use": make(case, only),
        "the order of slots": make(case, ids, slots=range(slots)[::-1]),
        "another slot's place": make(case, ids, slots=sorted(range(slots), key=lambda s: s == slot)),
        "what is in other slots": _with_own(make(case, ids, slots=range(slots), seed=1), first, slot),
        "the layer": _with_own(make(case, ids, case.layers - 1, slots=range(slots), seed=1), first, slot),
    }
    for name, given in variants.items():
        assert row_bits(run(given, form)[0], row) == want, f"the bits depend on {name}"


def _with_own(given: Given, first: Given, slot: int) -> Given:
    """The first's adapter in this one's layer."""
    to, of = int(given.adapters.layer), int(first.adapters.layer)
    a, b = given.adapters.a.copy(), given.adapters.b.copy()
    a[to, slot], b[to, slot] = first.adapters.a[of, slot], first.adapters.b[of, slot]
    return dataclasses.replace(given, adapters=dataclasses.replace(given.adapters, a=a, b=b))


def check_plain_rows(case: Case, form: str, slot_ids: Sequence[int]) -> None:
    """Rows without an adapter have the bits that they have where nobody has one."""
    some, none = make(case, slot_ids, 1), make(case, [-1] * case.rows)
    (one, _), (two, _) = run(some, form), run(none, form)
    plain = ~some.active
    assert plain.any() and some.active.any()
    assert row_bits(one, plain) == row_bits(two, plain)
    assert row_bits(one, some.active) != row_bits(two, some.active)


def check_broken_row(case: Case, form: str, slot_ids: Sequence[int], row: int, value: float) -> None:
    """One input of one row is no number: no other row's bits change."""
    given = make(case, slot_ids, 1)

    def spoil(x: np.ndarray) -> None:
        x[row, 5] = value

    (sound, _), (broken, _) = run(given, form), run(with_x(given, spoil), form)
    others = np.arange(case.rows) != row
    assert row_bits(broken, others) == row_bits(sound, others)
    assert finite_rows(sound).all() and not finite_rows(broken)[row]


def check_chain(cases: Sequence[Case], form: str, slot_ids: Sequence[int]) -> None:
    """The ops one after the other in every layer, each with the arrivals that the one before leaves: the same bits as with
    arrivals of its own, and nothing left in counters that the next would use."""
    arrivals, counted = counters(cases[0]), []
    for layer in range(cases[0].layers):
        for case in cases:
            given = make(case, slot_ids, layer)
            single, _ = run(given, form)
            out, after = run(given, form, arrivals)
            assert row_bits(out, slice(None)) == row_bits(single, slice(None)), (layer, case.op)
            counted.append(check_counters(given, after, form, before=arrivals))
            arrivals = after
    assert np.diff(sorted(counted)).min() >= LINE, "programs of one linear wait where those of the next count"


def check_repeated(cases: Sequence[Case], form: str, slot_ids: Sequence[int], calls: int) -> None:
    """The ops of all layers without anything between them, `calls` times: the same bits every time, which do not depend on
    who came first."""
    given = [make(case, slot_ids) for case in cases]

    def chain(given: list[Given]) -> list[Any]:
        arrivals, out = new_arrivals(len(counters(cases[0]))), []
        for layer in range(cases[0].layers):
            for one in given:
                adapters = dataclasses.replace(one.adapters, layer=jnp.int32(layer))
                found, arrivals = call(dataclasses.replace(one, adapters=adapters), form, arrivals)
                out.append(found)
        return out

    operands = jax.device_put(given)
    with jax.default_matmul_precision("highest"):
        jitted = jax.jit(chain).lower(operands).compile()
    first, *others = ([np.asarray(v) for v in jax.tree.leaves(jitted(operands))] for _ in range(calls))
    for other in others:
        assert all(checks.same_bits(a, b) for a, b in zip(first, other, strict=True)), "somebody was first"
