"""lora_shrink and lora_expand, both forms (Triton interpreted), against numpy float64 and against themselves."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels import lora_expand, lora_shrink
from lora_jax.kernels.cases import CASES, LINEARS, MIXES, Case

from tests.support import lora_oracle

IMPLEMENTATIONS = ("triton", "xla")
# Rank 256 in tiles of rows takes minutes interpreted; it is compiled for cards, and run on a GPU by tests/device.
SMALL = [
    case
    for case in CASES
    if (case.linear.name == "smollm2-135m.qkv" or case.linear.name.startswith("tiny."))
    and case.rows * case.rank < 20_000
]
ODD = LINEARS["tiny.ragged"]


class Operands(NamedTuple):
    x: Any
    a: Any
    b: Any
    y: Any
    slot_ids: Any
    layer: Any


def operands(case: Case, seed: int = 0) -> Operands:
    rng = np.random.default_rng(seed)
    linear, dtype = case.linear, jnp.dtype(case.dtype)
    stack, columns = (case.layers, case.slots), sum(linear.slices)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape, np.float32)).astype(dtype)

    return Operands(
        x=normal(case.rows, linear.inputs),
        a=normal(*stack, len(linear.slices) * case.rank, linear.inputs, scale=linear.inputs**-0.5),
        b=normal(*stack, case.rank, columns, scale=case.rank**-0.5),
        y=normal(case.rows, columns),
        slot_ids=case.slot_ids(seed),
        layer=np.int32(case.layers - 1),
    )


@functools.cache
def op(implementation: str, slices: tuple[int, ...]):
    options: dict[str, Any] = dict(implementation=implementation, interpret=implementation == "triton")

    def lora(x, a, b, y, slot_ids, layer):
        h = lora_shrink(x, a, slot_ids, layer, **options)
        return lora_expand(y, h, b, slot_ids, layer, slices=slices, **options), h

    return jax.jit(lora)


@functools.cache
def run(case: Case, implementation: str) -> tuple[Operands, np.ndarray, np.ndarray]:
    given = operands(case)
    with jax.default_matmul_precision("highest"):
        out, h = op(implementation, case.linear.slices)(*given)
    return given, np.asarray(out), np.asarray(h)


def oracle(case: Case, given: Operands, slot_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    layer = given.layer
    return lora_oracle.lora(given.x, given.a[layer], given.b[layer], given.y, slot_ids, case.linear.slices)


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_equals_float64(case: Case, implementation: str) -> None:
    given, out, h = run(case, implementation)
    want, tolerance = oracle(case, given, given.slot_ids)
    np.testing.assert_array_less(np.abs(out.astype(np.float64) - want), tolerance + 1e-300)
    base = given.slot_ids < 0
    assert bits(out[base]) == bits(given.y[base])
    assert not h[:, base].any()
    assert h.shape[1:] == (case.rows, len(case.linear.slices) * case.rank) and h.dtype == np.float32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_the_tolerance_tells_a_wrong_slot(case: Case, implementation: str) -> None:
    given, out, _ = run(case, implementation)
    wrong = np.where(given.slot_ids < 0, 0, (given.slot_ids + 1) % case.slots)
    want, tolerance = oracle(case, given, wrong)
    beyond = np.abs(out.astype(np.float64) - want) > tolerance
    assert (beyond.mean(axis=1) > 0.9).all()


@pytest.mark.parametrize("linear", ("tiny.qkv", "tiny.ragged"))
@pytest.mark.parametrize("rows", (3, 8, 9))
def test_a_program_takes_several_rows(monkeypatch, rows: int, linear: str) -> None:
    """Fewer of them than it has turns, as many, and a rest."""
    module = sys.modules["lora_jax.kernels.lora_expand"]
    rule, used = module.expand_tiles, []

    def tiles(*args: Any) -> Any:
        used.append(dataclasses.replace(rule(*args), turns=4))
        return used[-1]

    monkeypatch.setattr(module, "expand_tiles", tiles)
    for mix in MIXES:
        case = Case(LINEARS[linear], rows, 8, mix, "float32")
        given = operands(case)
        h = lora_shrink(*given[:2], given.slot_ids, given.layer, implementation="xla")
        how = dict(slices=case.linear.slices, implementation="triton", interpret=True)
        out = np.asarray(lora_expand(given.y, h, given.b, given.slot_ids, given.layer, **how))
        want, tolerance = oracle(case, given, given.slot_ids)
        np.testing.assert_array_less(np.abs(out.astype(np.float64) - want), tolerance + 1e-300)
        assert bits(out[given.slot_ids < 0]) == bits(given.y[given.slot_ids < 0])
    assert {t.block_t for t in used} == {1}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", (6, 70))
def test_every_mix(rows: int, implementation: str) -> None:
    for mix in MIXES:
        case = Case(LINEARS["tiny.qkv"], rows, 8, mix, "float32")
        given, out, _ = run(case, implementation)
        want, tolerance = oracle(case, given, given.slot_ids)
        np.testing.assert_array_less(np.abs(out - want), tolerance + 1e-300, err_msg=mix)
        if mix == "none":
            assert bits(out) == bits(given.y)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", (6, 70))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_bits_depend_on_nothing_but_the_row(rows: int, dtype: str, implementation: str) -> None:
    """Other rows, their slots, other adapters and the slot that holds the row's adapter: all changed, no bit moves."""
    case = Case(LINEARS["smollm2-135m.qkv"] if rows == 6 else ODD, rows, 16, "uniform", dtype)
    given, other = operands(case, 0), operands(case, 1)
    function = op(implementation, case.linear.slices)
    for row, slot, moved in ((0, 3, 3), (1, 2, 7), (rows - 1, 5, 0)):
        ids = np.where(np.arange(rows) == row, slot, given.slot_ids).astype(np.int32)
        changed = Operands(*(np.array(v) for v in other))
        changed.x[row], changed.y[row], changed.slot_ids[row] = given.x[row], given.y[row], moved
        changed.a[given.layer, moved], changed.b[given.layer, moved] = (
            w[given.layer, slot] for w in (given.a, given.b)
        )
        first, h_first = function(*given._replace(slot_ids=ids))
        second, h_second = function(*changed)
        assert bits(h_first[:, row]) == bits(h_second[:, row])
        assert bits(first[row]) == bits(second[row])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", (6, 70))
@pytest.mark.parametrize("poison", (np.nan, np.inf))
def test_a_broken_adapter_reaches_its_own_rows_alone(rows: int, poison: float, implementation: str) -> None:
    case = Case(ODD, rows, 8, "distinct", "float32", slots=3)
    given = operands(case)
    sound, _ = op(implementation, ODD.slices)(*given)
    given.a[:, 1], given.b[:, 1] = poison, poison
    given.a[0], given.b[0] = poison, poison  # another layer
    broken, _ = op(implementation, ODD.slices)(*given)
    hit = given.slot_ids == 1
    assert 0 < hit.sum() < rows
    assert not np.isfinite(np.asarray(broken)[hit]).any()
    assert bits(np.asarray(broken)[~hit]) == bits(np.asarray(sound)[~hit])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_layer_is_an_operand(implementation: str) -> None:
    case = Case(ODD, 4, 8, "identical", "float32", layers=3)
    given = operands(case)
    traces = []

    def traced(*args):
        traces.append(args)
        return op(implementation, ODD.slices)(*args)[0]

    function = jax.jit(traced)
    for layer in range(3):
        now = given._replace(layer=np.int32(layer))
        want, tolerance = oracle(case, now, now.slot_ids)
        np.testing.assert_array_less(np.abs(np.asarray(function(*now)) - want), tolerance)
    assert len(traces) == 1


def test_a_result_in_float32_of_narrower_weights() -> None:
    case = Case(ODD, 5, 8, "uniform")
    given = operands(case)
    y = given.y.astype(np.float32)
    want, tolerance = oracle(case, given._replace(y=y), given.slot_ids)
    for implementation in IMPLEMENTATIONS:
        out, _ = op(implementation, ODD.slices)(*given._replace(y=y))
        assert out.dtype == jnp.float32
        np.testing.assert_array_less(np.abs(np.asarray(out) - want), tolerance + 1e-300)


def test_large_stacks_are_addressed_with_64_bits(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The Triton code of a stack beyond 4 GiB counts in 64 bits, that of a small one in 32."""
    from jax.experimental import pallas as pl

    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)

    def triton_code(rows: int, layers: int) -> str:
        avals = (
            jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16),
            jax.ShapeDtypeStruct((layers, 64, 256, 4096), jnp.bfloat16),
            jax.ShapeDtypeStruct((layers, 64, 256, 4096), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )

        def lora(x, a, b, y, slot_ids, layer):
            h = lora_shrink(x, a, slot_ids, layer)
            return lora_expand(y, h, b, slot_ids, layer, slices=(4096,))

        with jax.sharding.use_abstract_mesh(mesh):
            jax.jit(lora).trace(*avals).lower(lowering_platforms=("cuda",))
        return capfd.readouterr().out

    for rows in (8, 512):
        small, large = triton_code(rows, 1), triton_code(rows, 33)
        assert small.count("tt.func") == large.count("tt.func") == 2
        assert "i64" not in small
        assert all("i64" in kernel for kernel in large.split("tt.func")[1:])


def _refusals():
    case = Case(ODD, 4, 8, "identical", "float32")
    good = operands(case)
    h = np.zeros((1, 4, 24), np.float32)
    yield "a must have the dtype of x", "shrink", good._replace(a=good.a.astype(np.float16)), {}
    yield "x must be one of", "shrink", good._replace(x=good.x.astype(np.int32), a=good.a.astype(np.int32)), {}
    yield r"needs x \[T, K\]", "shrink", good._replace(x=good.x[:, :-1]), {}
    yield r"needs x \[T, K\]", "shrink", good._replace(a=good.a[0]), {}
    yield r"slot_ids must be int32 \[4\]", "shrink", good._replace(slot_ids=good.slot_ids[:3]), {}
    yield r"slot_ids must be int32 \[4\]", "shrink", good._replace(slot_ids=good.slot_ids.astype(np.int16)), {}
    yield "layer must be an int32 scalar", "shrink", good._replace(layer=np.zeros(1, np.int32)), {}
    yield "implementation must be one of", "shrink", good, dict(implementation="auto")
    yield r"needs x \[T, K\]", "shrink", good._replace(x=good.x[:0]), {}
    yield r"needs y \[T, N\]", "expand", good._replace(y=good.y[:, 1:]), dict(h=h)
    yield "rank of b must be a power of two", "expand", good._replace(b=good.b[:, :, :7]), dict(h=h)
    yield r"slices \(24, 5\) must", "expand", good, dict(h=h, slices=(24, 5))
    yield "must be positive", "expand", good, dict(h=h, slices=(129, 0))
    yield r"h must be float32 \[P, 4, 3 \* 8\]", "expand", good, dict(h=h[:, :3])
    yield r"h must be float32 \[P, 4, 3 \* 8\]", "expand", good, dict(h=h.astype(np.float16))
    yield "slot_ids must be int32", "expand", good._replace(slot_ids=good.slot_ids[:, None]), dict(h=h)


@pytest.mark.parametrize("message, name, given, options", list(_refusals()))
def test_refuses(message: str, name: str, given: Operands, options: dict[str, Any]) -> None:
    x, a, b, y, slot_ids, layer = given
    options = dict(options)
    with pytest.raises(ValueError, match=f"lora_{name}: .*{message}"):
        if name == "shrink":
            lora_shrink(x, a, slot_ids, layer, **options)
        else:
            h, slices = options.pop("h"), options.pop("slices", ODD.slices)
            lora_expand(y, h, b, slot_ids, layer, slices=slices, **options)


def test_cases_have_distinct_ids() -> None:
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))


def test_mixes() -> None:
    for mix, rows, slots in itertools.product(MIXES, (1, 2, 65), (1, 8)):
        ids = Case(ODD, rows, 8, mix, slots=slots).slot_ids(3)
        assert ids.dtype == np.int32 and ids.shape == (rows,) and -1 <= ids.min() and ids.max() < slots
        if rows > 1 and mix not in ("identical",):
            assert -1 in ids
    assert len(set(Case(ODD, 9, 8, "distinct").slot_ids())) == 9
