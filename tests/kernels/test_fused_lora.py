"""Adapters inside products of few rows, against float64 and against themselves: interpreted Triton kernels and plain-JAX forms.

Interpreted, compiling takes nearly all of the time, and calls of one `Case` share a program: few cases, with several mixes each.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_jax.kernels.adapters import LINE, Adapters, adapter_counters, fits_adapters
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.lora_items import FIELDS, ITEM, most_items, work_items
from lora_jax.kernels.residual_matmul import residual_matmul
from lora_jax.kernels.skinny_matmul import skinny_lora_matmul
from lora_jax.kernels.swiglu import lora_swiglu
from lora_jax.kernels.tuning import lora_tiles, matmul_tiles

from tests.support import fused_lora_checks as fused
from tests.support import kernel_checks as checks
from tests.support.fused_lora_checks import Case
from tests.support.fused_tiles import tiles_of

PATTERN = (1, -1, 0, 3, 1, 4, 2, 5, -1)  # rows without an adapter, two of one, slots that a linear does not use
INPUTS = 576  # with few rows a shrink has two parts, and not of one size
SLICES = {"skinny": (128, 64, 64), "residual": (128,), "swiglu": (128, 128)}
BLOCKS = 3  # of squares: no power of two
# Every number of rows; arrays and norms by turns. The dtypes that are left out differ from those here in their tiles alone.
ROWS = {
    "skinny": {"float32": (1, 3, 8, 16, 17, 33, 64), "bfloat16": (1, 3, 8, 16, 17, 33, 64)},
    "residual": {"float32": (1, 8), "bfloat16": (3, 8, 16)},
    "swiglu": {"float32": (3, 8, 17, 33), "bfloat16": (1, 8, 16, 33, 64)},
}


def mixed(rows: int, first: int = 0) -> list[int]:
    return [PATTERN[(first + t) % len(PATTERN)] for t in range(rows)]


def case_of(op: str, rows: int, dtype: str) -> Case:
    """x is a norm in about half of the cases, and each number of rows has it in one dtype."""
    norm = op != "residual" and (rows % 2 == 1) == (dtype == "float32")
    return Case(op, rows, INPUTS, SLICES[op], dtype, BLOCKS if norm else None)


def small(op: str, rows: int, inputs: int, slices: tuple[int, ...], dtype: str, *ranks: int) -> Case:
    """One layer, one rank for each slot."""
    padded = max(8, 1 << (max(ranks) - 1).bit_length())
    return Case(op, rows, inputs, slices, dtype, ranks=(ranks,) * len(fused.OPS), padded_rank=padded, layers=1)


# Several tiles of columns of a slice, few items and many.
FEW = ((16, 9, 5, 16, 0, 1),) * len(fused.OPS)
WIDE = [
    Case("skinny", 33, INPUTS, (384, 256, 384), "bfloat16", BLOCKS, FEW, 16),
    Case("skinny", 64, INPUTS, (512, 512), "bfloat16", None, FEW, 16),
    Case("skinny", 33, INPUTS, (256, 256), "bfloat16", BLOCKS),
]
CASES = WIDE + [
    case_of(op, rows, dtype) for op, of in ROWS.items() for dtype, numbers in of.items() for rows in numbers
]
FEW_AND_MANY = [case for case in CASES if case.rows in (8, 33)]
of_case = pytest.mark.parametrize("case", FEW_AND_MANY, ids=lambda case: case.id)
in_form = pytest.mark.parametrize("form", checks.FORMS)


# ---- against float64 ----
def check_mixes(case: Case, form: str) -> None:
    """All kinds of rows in the first and in the last layer; all with one adapter; none with one."""
    last, rows = case.layers - 1, case.rows
    for ids, layer in ((mixed(rows), 0), (mixed(rows, 2), last), ([1] * rows, 1), ([-1] * rows, last)):
        fused.check(fused.make(case, ids, layer), form)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_interpreted(case):
    check_mixes(case, "interpret")


@pytest.mark.parametrize("case", [case for case in CASES if case.rows in (1, 3, 33)], ids=lambda case: case.id)
def test_plain_jax(case):
    """One row gathers its adapter, several go through the slots."""
    check_mixes(case, "xla")


@pytest.mark.parametrize("op", fused.OPS)
def test_several_parts(op):
    """Of the product too."""
    case = Case(op, 8, 2048, (128,) * len(SLICES[op]), "bfloat16", BLOCKS if op != "residual" else None)
    assert op == "swiglu" or matmul_tiles(case.rows, case.inputs, case.outputs, 2, True).parts == 2
    assert tiles_of(op, case.rows, case.inputs, case.slices, 24, 16, 2).parts > 1
    fused.check(fused.make(case, mixed(case.rows), 2), "interpret")


@pytest.mark.parametrize(
    "case",
    [
        small("skinny", 17, 64, (12032, 128, 128), "bfloat16", 5, 16, 8),  # tiles of 128 columns
        small("skinny", 1, 16640, (64,), "bfloat16", 5, 16, 8),  # 65 steps for 16 parts: nothing is left for the last
        small("skinny", 3, 1088, (128,), "bfloat16", 40, 16, 5),  # one slice, three parts
        small("skinny", 17, 2112, (64, 64), "float32", 16, 8, 3),  # 33 steps for 3 parts
        small("residual", 3, 64, (64,), "bfloat16", 100, 128, 20),  # more than a chunk a slot
        small("swiglu", 4, 64, (64, 64), "float32", 3, 8, 1),  # fewer padded rank rows than an item
    ],
    ids=lambda case: case.id,
)
def test_shapes_at_the_edge(case):
    for first in (0, 1):
        ids = [(first + t) % 4 if (first + t) % 4 < 3 else -1 for t in range(case.rows)]
        fused.check(fused.make(case, ids), "interpret")


# ---- on what a row's bits depend ----
@of_case
@in_form
@pytest.mark.parametrize("slot", [-1, 3, 5])
def test_a_rows_bits_depend_on_itself(case, form, slot):
    """Adapters of at most an item."""
    assert slot < 0 or case.own_ranks[slot] <= ITEM
    fused.check_row_bits(case, form, case.rows // 2, slot)


@of_case
@in_form
def test_bits_of_rows_whose_adapters_are_several_items(case, form):
    for slot in (slot for slot, rank in enumerate(case.own_ranks) if rank > ITEM):
        fused.check_row_bits(case, form, case.rows // 2, slot)


@of_case
@in_form
def test_rows_without_an_adapter(case, form):
    fused.check_plain_rows(case, form, mixed(case.rows))


@of_case
@in_form
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_row_stays_alone(case, form, value):
    for row in (0, 1):  # with an adapter and without
        fused.check_broken_row(case, form, mixed(case.rows), row, value)


# ---- counters ----
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_array_of_counters_serves_all_linears_and_layers(dtype):
    fused.check_chain([case_of(op, 8, dtype) for op in fused.OPS], "interpret", mixed(8))


@pytest.mark.parametrize("case", [case_of(op, 8, "bfloat16") for op in fused.OPS], ids=lambda case: case.id)
def test_counters_of_others_are_left_alone(case):
    """Programs of a residual product count pieces while others still shrink."""
    given, arrivals = fused.make(case, mixed(8), 1), fused.counters(case)
    arrivals[case.outputs // 64 : fused.PIECES] = 7
    out, after = fused.run(given, "interpret", arrivals)
    fused.check_result(given, out, "interpret")
    fused.check_counters(given, after, "interpret", before=arrivals)


def test_repeated_calls_have_the_same_bits():
    cases = [dataclasses.replace(case_of(op, 3, "bfloat16"), layers=1) for op in ("skinny", "residual")]
    fused.check_repeated(cases, "interpret", mixed(3), calls=2)


@pytest.mark.parametrize("case", [case_of(op, 8, "bfloat16") for op in fused.OPS], ids=lambda case: case.id)
def test_what_never_came_shows_as_nan(case):
    """An item too few is counted."""
    given, arrivals = fused.make(case, mixed(8), 1), fused.counters(case)
    at = fused.check_counters(given, fused.run(given, "interpret")[1], "interpret")
    arrivals[at] = -1
    out, _ = fused.run(given, "interpret", arrivals)
    assert not fused.finite_rows(out).any()


# ---- lists of work ----
@st.composite
def steps(draw) -> tuple[list[int], np.ndarray, int]:
    """Slots in use, ranks [G, S], padded rank."""
    slots, padded = draw(st.integers(1, 12)), draw(st.sampled_from([8, 16, 32, 64, 128, 256]))
    ranks = st.lists(st.integers(0, padded), min_size=slots, max_size=slots)
    used = draw(st.lists(st.integers(0, slots - 1), unique=True))
    return used, np.array(draw(st.lists(ranks, min_size=1, max_size=4))), padded


def items_of(rank: int) -> int:
    """Items that begin and end with a step of the expand, of which the shortest takes two."""
    number = -(-rank // ITEM)
    return number if number <= 2 else -(-number // 4) * 4


@given(steps())
def test_work_items(step):
    """Each rank row of the slots in use once; what a kernel reads of B lies inside, also where it counts for nothing."""
    slots, ranks, padded = step
    room = most_items(ranks.shape[1], padded)
    lists = work_items(slots, ranks, padded, room)
    assert lists.dtype == np.int32 and lists.shape == (len(ranks), room * FIELDS)
    for row, of_slot in zip(lists, ranks, strict=True):
        b_rows, fields, count = row[: room * ITEM].reshape(room, ITEM), row[room * ITEM :][: 3 * room], row[-room]
        assert not row[len(row) - room + 1 :].any() and 0 <= b_rows.min() and b_rows.max() < len(of_slot) * padded
        found, items = [], fields.reshape(3, room).T[:count].tolist()
        for j, (slot, first, number) in enumerate(items):
            assert 0 <= number <= ITEM
            for i in range(number):
                found.append((slot, first + i))
                assert b_rows[j, i] == slot * padded + first + i
            assert (b_rows[j] // padded == slot).all(), "rows of another slot: they may change while this one is used"
        assert sorted(found) == sorted((slot, r) for slot in slots for r in range(of_slot[slot]))
        assert count == sum(items_of(int(of_slot[slot])) for slot in slots), "too many items"


@given(steps())
def test_the_items_of_a_slot_lie_in_steps_of_the_expand_that_do_not_depend_on_others(step):
    slots, ranks, padded = step
    room = most_items(ranks.shape[1], padded)
    for row in work_items(slots, ranks, padded, room):
        fields = row[room * ITEM :][: 3 * room].reshape(3, room).T[: row[-room]]
        for slot in slots:
            at = np.flatnonzero(fields[:, 0] == slot)
            assert (np.diff(at) == 1).all() and (np.diff(fields[at, 1]) == ITEM).all(), "not in order"
            assert len(at) < 2 or at[0] % min(len(at), 4) == 0


@given(slots=st.integers(1, 64), rank=st.integers(1, 256))
def test_most_items(slots, rank):
    room, needed = most_items(slots, rank), slots * items_of(rank)
    assert room % 4 == 0 and needed <= room < needed + 4
    assert work_items(range(slots), np.full((1, slots), rank), rank, room)[0, -room] == needed


def test_a_rank_that_its_slot_cannot_hold_is_named():
    with pytest.raises(ValueError, match="a rank of 9 in slots for 8"):
        work_items((0,), np.array([[9]]), 8, 4)


def test_counters_are_lines_of_their_own():
    """Programs of one linear wait at their counter while those of the next count at theirs."""
    items = jnp.zeros((4, 8 * FIELDS), jnp.int32)
    assert adapter_counters(items, 32) == 8 + 32 * 4 * LINE and LINE * 4 == 128


# ---- tiles ----
@given(
    rows=st.integers(1, 64),
    inputs=st.integers(1, 512).map(lambda n: 64 * n),
    slices=st.integers(1, 3),
    fours=st.integers(1, 64),
    rank=st.sampled_from((8, 16, 32, 256)),
    itemsize=st.sampled_from((2, 4)),
    columns=st.sampled_from((64, 128)),
    waits=st.booleans(),
)
def test_tiles_of_a_shrink_cover_its_inputs(rows, inputs, slices, fours, rank, itemsize, columns, waits):
    tiles = lora_tiles(rows, inputs, slices, 4 * fours, rank, itemsize, columns, waits=waits)
    assert inputs % tiles.block_k == 0 and tiles.block_k in (32, 64, 128, 256)
    assert 1 <= tiles.groups <= min(32, 4 * fours) and 1 <= tiles.parts <= 16
    assert 4 * fours * ITEM % tiles.chunk == 0 and tiles.chunk % ITEM == 0, "a chunk beyond the list of items"
    if inputs <= 16384:
        part = -(-inputs // tiles.block_k // tiles.parts) * tiles.block_k
        assert (tiles.parts - 1) * part < inputs <= tiles.parts * part, "a part of K is missing, or one is empty"
    width = max(16, 1 << (tiles.items * slices * ITEM - 1).bit_length())
    staged = (max(16, 1 << (rows - 1).bit_length()) + width) * tiles.block_k * itemsize
    held = 2 if rows <= 16 and tiles.block_k == 256 else 4  # a product of few rows in steps of 128 has three stages
    assert staged * held <= 99 << 10, "more shared memory than the smallest card has"
    assert tiles.joined or rank <= ITEM
    assert rows <= 16 or itemsize == 4 or width <= columns, "more a step than the product has"


def test_fits_adapters():
    assert fits_adapters(1, 64, (64,), jnp.bfloat16) and fits_adapters(64, 4096, (4096,) * 3, jnp.float32)
    assert not fits_adapters(1, 64, (64,), jnp.float16), "h could overflow"
    assert fits_adapters(8, 64, (64,) * 4, jnp.float32) and not fits_adapters(8, 64, (64,) * 5, jnp.float32)
    assert fits_adapters(16, 64, (12160, 64, 64), jnp.bfloat16) and fits_adapters(
        17, 64, (12032, 128, 128), jnp.bfloat16
    )
    assert not fits_adapters(17, 64, (12160, 64, 64), jnp.bfloat16), "a tile of columns in two slices"


# ---- wrong operands ----
def operands(op: str, dtype=jnp.float32) -> tuple[tuple, Adapters]:
    """4 rows, 64 inputs, 2 layers and slots, 3 linears; all but the adapters and the counters."""
    slices = (64, 64) if op == "swiglu" else (64, 128)
    x, w = jnp.zeros((4, 64), dtype), jnp.zeros((64, sum(slices)), dtype)
    a, b = jnp.zeros((2, 2, 16, 64), dtype), jnp.zeros((2, 2, 8, sum(slices)), dtype)
    items = jnp.asarray(work_items([0], np.ones((3, 2), int), 8, 4))
    stream = (jnp.zeros((4, 192), dtype), jnp.zeros(192, dtype)) if op == "residual" else ()
    return (x, w, *stream), Adapters(a, b, jnp.zeros(4, jnp.int32), items, jnp.int32(0), slices, 2)


WRONG_ADAPTERS = {
    "dimensions of a": (r"needs a \[L, S, 2 \* R, 64\] and b", lambda v: dict(a=v.a[0])),
    "dimensions of b": (r"needs a .* and b \[L, S, R, \d+\], got", lambda v: dict(b=v.b[0])),
    "inputs of a": (r"needs a .*, got \(2, 2, 16, 32\)", lambda v: dict(a=v.a[..., :32])),
    "outputs of b": ("needs a .* and b", lambda v: dict(b=v.b[..., :-64])),
    "ranks of a": (r"needs a .*, got \(2, 2, 8, 64\)", lambda v: dict(a=v.a[:, :, :8])),
    "number of slices": (r"needs a \[L, S, 1 \* R, 64\]", lambda v: dict(slices=(sum(v.slices),))),
    "dtype of a": (r"a and b must have the dtype of the product \(float32\)", lambda v: dict(a=v.a.astype("bfloat16"))),
    "dtype of b": ("a and b must have .* got float32 and bfloat16", lambda v: dict(b=v.b.astype("bfloat16"))),
    "sum of slices": (r"slices \(64, \d+\) of float32 must add up to", lambda v: dict(slices=(64, 192 - v.slices[1]))),
    "width of slices": (r"slices \(32, \d+\) ", lambda v: dict(slices=(32, sum(v.slices) - 32))),
    "number of slot ids": (r"slot_ids must be int32 \[4\]", lambda v: dict(slot_ids=v.slot_ids[:3])),
    "dtype of slot ids": (r"slot_ids must be int32 \[4\], got int16", lambda v: dict(slot_ids=v.slot_ids.astype("i2"))),
    "shape of layer": ("layer must be an int32 scalar", lambda v: dict(layer=jnp.zeros(1, jnp.int32))),
    "dtype of layer": ("layer must be an int32 scalar, got float32", lambda v: dict(layer=jnp.float32(0))),
    "dtype of items": (r"items must be int32 \[G > 2, J \* 20\]", lambda v: dict(items=v.items.astype("int16"))),
    "dimensions of items": ("items must be .*, J a multiple of 4", lambda v: dict(items=v.items[0])),
    "length of items": (r"items must be .*, got int32 \(3, 60\)", lambda v: dict(items=v.items[:, : 3 * FIELDS])),
    "number of lists": (r"items must be int32 \[G > 2, .* got int32 \(2, 80\)", lambda v: dict(items=v.items[:2])),
    "linear": (r"items must be int32 \[G > 3, ", lambda v: dict(linear=3)),
    "negative linear": (r"items must be int32 \[G > -1, ", lambda v: dict(linear=-1)),
    "layers of b": (r"needs a \[L, S, ", lambda v: dict(b=v.b[:1])),
    "slots of b": (r"needs a \[L, S, ", lambda v: dict(b=v.b[:, :1])),
}
CALLS = {
    "skinny": ("skinny_lora_matmul", skinny_lora_matmul),
    "swiglu": ("lora_swiglu", lora_swiglu),
    "residual": (
        "residual_matmul",
        lambda *given, **options: residual_matmul(*given[:-2], given[-1], eps=1e-5, adapters=given[-2], **options),
    ),
}


def refused(op: str, message: str, given: tuple, adapters: Adapters, arrivals=None, **options) -> None:
    name, call = CALLS[op]
    counted = adapter_counters(operands(op)[1].items, 2) + (3 if op == "residual" else 0)
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        call(*given, adapters, new_arrivals(counted) if arrivals is None else arrivals, **options)


@pytest.mark.parametrize("op", fused.OPS)
@pytest.mark.parametrize("wrong", WRONG_ADAPTERS)
def test_wrong_adapters_are_named(op, wrong):
    given, adapters = operands(op)
    message, change = WRONG_ADAPTERS[wrong]
    refused(op, message, given, dataclasses.replace(adapters, **change(adapters)))


@pytest.mark.parametrize("op", fused.OPS)
def test_wrong_operands_beside_adapters_are_named(op):
    given, adapters = operands(op)
    (x, w, *stream), number = given, adapter_counters(adapters.items, 2)
    refused(op, "implementation must be one of", given, adapters, implementation="cuda")
    refused(op, r"needs . \[R, K\] and w \[K, N\]", (x, w[:32], *stream), adapters)
    refused(op, "w must have the dtype of .", (x, w.astype("bfloat16"), *stream), adapters)
    # of the residual product, which has pieces of its own, that is not enough either
    few = new_arrivals(number + 2 if op == "residual" else number - 1)
    refused(op, rf"arrivals must be int32 zeros of at least {len(few) + 1} pieces", given, adapters, few)
    refused(op, "arrivals must be int32 zeros .* got float32", given, adapters, jnp.zeros(number + 3))
    name, call = CALLS[op]
    with pytest.raises(ValueError, match=f"{name}: arrivals must be .*, got None"):
        call(*given, adapters, None)


@pytest.mark.parametrize("op", ["skinny", "swiglu"])
def test_adapters_in_float16_are_refused(op):
    refused(op, r"slices .* of float16 must", *operands(op, jnp.float16))


def test_gate_and_up_with_adapters_lie_side_by_side():
    (x, w), adapters = operands("swiglu")
    refused("swiglu", "w must hold gate and up side by side", (x, w[:, :-1]), adapters)
