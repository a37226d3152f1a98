"""`bench kernels`: bytes by hand, loops that really do every call, and the timed programs as an H200 would run them."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels import lora_expand, lora_shrink
from lora_jax.kernels.cases import ATTENTION_CASES, CASES, TIMED_ATTENTION, TIMED_CASES, AttentionCase
from lora_jax.kernels.decode_attention import decode_attention

from lora_jax.bench import kernel_timing, kernels
from lora_jax.bench.kernel_timing import Timed, Timing
from lora_jax.bench.machine import Bandwidth
from lora_jax.cli import main
from lora_jax.device import set_up_device
from lora_jax.errors import ConfigError, LoraJaxError
from tests.support.gpu_program import run_compiler

RAGGED = next(case for case in CASES if case.linear.name == "tiny.ragged" and case.rows == 7)
TINY = next(case for case in ATTENTION_CASES if case.name == "tiny")
WINDOW = next(case for case in ATTENTION_CASES if case.name == "odd-head-window")
LARGE = next(case for case in TIMED_ATTENTION if case.name == "llama2-7b-b64-c2048")


@pytest.fixture(scope="module")
def setup():
    return set_up_device("cpu", "xla", 0.9)


def timed(op, case, setup, calls=3, rotation=1 << 14) -> Timed:
    given = kernel_timing.operands(op, case, ["xla"], rotation, calls)["xla"]
    return Timed(op, case, "xla", given, setup, calls)


# ---- bytes ----
def test_bytes_by_hand():
    """Llama-2-7B's fused qkv, rank 16, bfloat16: a distinct mix of 8 rows has 7 adapters and one base row."""
    distinct = next(c for c in TIMED_CASES if c.id == "llama2-7b.qkv-t8-r16-distinct-bfloat16")
    assert kernel_timing.must_read("shrink", distinct) == 7 * 3 * 16 * 4096 * 2
    assert kernel_timing.must_read("expand", distinct) == 7 * 16 * 3 * 4096 * 2
    one = dataclasses.replace(distinct, mix="identical")
    assert kernel_timing.must_read("expand", one) == 16 * 3 * 4096 * 2
    assert kernel_timing.must_read("shrink", dataclasses.replace(distinct, mix="none")) == 0
    assert kernel_timing.must_read("attention", LARGE) == 64 * 2048 * 2 * 32 * 128 * 2
    assert kernel_timing.must_read("attention", WINDOW) == 2 * 8 * 2 * 4 * 24 * 4  # no more than the window
    with pytest.raises(ValueError, match="'other'"):
        kernel_timing.must_read("other", distinct)


def test_the_long_context_is_among_the_cases():
    assert (LARGE.rows, LARGE.pages * LARGE.page_size, LARGE.heads, LARGE.head_dim, LARGE.dtype) == (
        64,
        2048,
        32,
        128,
        "bfloat16",
    )
    found, unasked = kernels.catalogue()
    assert "attention/llama2-7b-b64-c2048" in unasked and set(unasked) < set(found)
    assert len(unasked) == len(set(unasked)) == 2 * len(TIMED_CASES) + len(TIMED_ATTENTION)


@pytest.mark.parametrize(("op", "case"), [("shrink", RAGGED), ("expand", RAGGED), ("attention", TINY)])
def test_operands_are_larger_than_a_cache(op, case):
    rotation = 1 << 20
    given = kernel_timing.operands(op, case, ["xla", "triton"], rotation, 7)
    entries = given["xla"].rotating
    different = len({np.asarray(e).tobytes() for e in entries})
    assert different * kernel_timing.must_read(op, case) >= rotation and len(entries) % 7 == 0
    one, other = given["xla"], given["triton"]  # the weights or pages lie there once
    assert one.carry is other.carry if op == "attention" else one.fixed[1] is other.fixed[1]


def test_what_reads_nothing_has_one_layer():
    given = kernel_timing.operands("shrink", dataclasses.replace(RAGGED, mix="none"), ["xla"], 1 << 20, 4)["xla"]
    assert given.fixed[1].shape[0] == 1 and len(given.rotating) == 4


# ---- the loops ----
def all_calls(op, case, calls):
    """(operands, what the loop gives, its carry at the end)."""
    given = kernel_timing.operands(op, case, ["xla"], 1 << 14, calls)["xla"]
    carry = [x + 0 for x in given.carry]
    return given, *kernel_timing.looped(op, case, "xla")(given.fixed, tuple(given.rotating[:calls]), carry)


def test_every_call_of_the_loop_is_done():
    given, outs, _ = all_calls("shrink", RAGGED, 5)
    x, a, ids = given.fixed
    for layer, out in enumerate(outs):
        want = lora_shrink(x, a, ids, jnp.int32(layer % a.shape[0]), implementation="xla")
        assert a.shape[0] > 1 and np.abs(want).max() > 0
        np.testing.assert_allclose(out, want, rtol=1e-6)

    given, outs, (y,) = all_calls("expand", RAGGED, 5)
    h, b, ids = given.fixed
    want, first = given.carry[0], np.asarray(given.carry[0])
    for layer in range(5):
        options = dict(slices=RAGGED.linear.slices, implementation="xla")
        want = lora_expand(want, h, b, ids, jnp.int32(layer % b.shape[0]), **options)
    np.testing.assert_allclose(y, want, rtol=1e-5)
    assert np.abs(want - first).max() > 1e-4 and outs == [None] * 5

    given, outs, (end, _) = all_calls("attention", WINDOW, 5)
    qkv, rope, positions = given.fixed
    kv, wants = given.carry[0], []
    for table in given.rotating[:5]:
        options = dict(scale=WINDOW.head_dim**-0.5, window=WINDOW.window, implementation="xla", heads=WINDOW.heads)
        want, kv, _ = decode_attention(qkv, rope, kv, table, positions, None, **options)
        wants.append(want)
    np.testing.assert_allclose(np.stack(outs), np.stack(wants), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(end, kv)
    assert np.abs(wants[0] - wants[1]).max() > 1e-5  # other pages, other values


def test_implementations_hand_the_pages_on(setup):
    """What is written in place exists once, however many work on it in turn."""
    given = kernel_timing.operands("attention", TINY, ["xla"], 1 << 14, 2)["xla"]
    one, two = (Timed("attention", TINY, "xla", given, setup, 2) for _ in range(2))
    for timed_op in (one, two, one):
        timed_op.round()
        assert one._carry is two._carry and not given.carry[0].is_deleted() and timed_op.finite()


def test_a_round_goes_on_where_the_last_one_stopped(setup):
    one = timed("shrink", RAGGED, setup, rotation=1 << 18)
    groups, used = one._groups, []
    program, one._at_once = one._program, 2
    assert len(groups) > 3
    one._program = lambda fixed, entries, carry: used.append(entries) or program(fixed, entries, carry)
    one._next = len(groups) - 1
    one.round()
    one.round()
    assert [next(i for i, g in enumerate(groups) if g is u) for u in used] == [len(groups) - 1, 0, 1, 2]


def test_a_round_by_a_clock(setup):
    one = timed("expand", RAGGED, setup, calls=4)
    one._at_once = 5
    assert one.round(iter([10.0, 10.5, 12.0]).__next__) == Timing(2.0 / 5 / 4, False)
    one._on_gpu = True
    for programs, started, bound in ((5, 1.7, True), (5, 1.5, False), (1, 1.9, False)):  # one is waited for at once
        one._at_once = programs
        assert one.round(iter([0.0, started, 2.0]).__next__).host_bound is bound


@pytest.mark.parametrize(("op", "case"), [("expand", RAGGED), ("attention", TINY)])
def test_nothing_is_copied_on_a_cpu_either(op, case, setup):
    calls = kernels.calls_of(op, "cpu", "xla")
    one = timed(op, case, setup, calls, rotation=1 << 22)
    large = one._carry[0].nbytes if op == "attention" else one._fixed[1].nbytes
    assert one._program.memory_analysis().temp_size_in_bytes < large / 2


def test_rounds_are_long_enough(setup, monkeypatch):
    one = timed("shrink", RAGGED, setup, calls=4)
    for seconds, programs in ((kernel_timing.CPU_ROUND / 4 / 6, 6), (1.0, 1), (1e-9, kernel_timing.MAX_IN_FLIGHT)):
        monkeypatch.setattr(one, "round", lambda s=seconds: Timing(s, False))
        one.calibrate()
        assert one._at_once == programs


def test_rounds_alternate():
    order = []
    ready = {name: SimpleNamespace(calibrate=lambda name=name: order.append(f"calibrate {name}")) for name in "ab"}
    out = kernels.alternate({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, ready, 3)
    assert order == ["calibrate a", "calibrate b", *"abbaab"]
    assert out == {"a": [3, 6, 7], "b": [4, 5, 8]}


@pytest.mark.parametrize(("op", "case"), [("shrink", RAGGED), ("expand", RAGGED), ("attention", TINY)])
def test_values_that_are_not_finite_are_an_error(op, case, setup, monkeypatch):
    assert "us" in kernels.measure(op, case, setup, 1, {"triton": "needs a GPU"})["xla"]
    monkeypatch.setattr(kernel_timing, "values", lambda shape, dtype, seed: jnp.full(shape, jnp.nan, dtype))
    with pytest.raises(LoraJaxError, match="not finite"):
        kernels.measure(op, case, setup, 1, {"triton": "needs a GPU"})


def test_values_are_small_and_differ():
    for dtype in ("float32", "bfloat16", "float16"):
        some = np.asarray(kernel_timing.values((64, 100), dtype, 1), np.float64)
        assert np.abs(some).max() <= 0.0501 and some.std() == pytest.approx(0.1 / 12**0.5, rel=0.1)
        assert len(np.unique(some)) > 500
        assert not np.array_equal(some, np.asarray(kernel_timing.values((64, 100), dtype, 2), np.float64))


# ---- what is reported ----
def test_medians_rates_and_shares(setup, monkeypatch):
    times = iter([9.0, 1.0, 3.0])
    monkeypatch.setattr(Timed, "calibrate", lambda self: None)
    monkeypatch.setattr(Timed, "round", lambda self: Timing(next(times), False))
    found = kernels.measure("attention", TINY, setup, 3, {"triton": "needs a GPU"})
    size = 2 * 80 * 2 * 2 * 16 * 4
    assert found == {
        "bytes": size,
        "dtype": "float32",
        "triton": {"not_run": "needs a GPU"},
        "xla": {"us": 3e6, "rounds_us": [9e6, 1e6, 3e6], "gb_per_second": size / 3 / 1e9, "host_bound": False},
    }
    bandwidth = Bandwidth(size / 1.5, 1)
    assert kernels.with_shares(found, bandwidth)["xla"]["share"] == pytest.approx(0.5)
    found["xla"]["host_bound"] = True
    line = kernels.row("attention/tiny", found, bandwidth, 20)
    assert line.split() == ["attention/tiny", "float32", "0.04", "needs", "a", "GPU", "3000000.00*", "0", "50%"]
    assert kernels.with_shares(found, Bandwidth(None, 1, "no room"))["xla"]["share"] is None


def test_a_large_case_runs_on_a_cpu_only_by_its_full_name():
    large = [f"attention/{name}-c2048" for name in ("llama2-7b-b8", "llama2-7b-b64", "llama3-8b-b64")]
    for only in (None, ["attention"], ["attention/llama"]):
        assert [n for n in kernels.too_large(kernels.chosen(only, cpu=True), only) if n.startswith("att")] == large
    only = ["attention", large[0]]
    assert kernels.too_large(kernels.chosen(only, cpu=True), only) == large[1:]
    assert kernels.too_large(kernels.chosen(large[:1], cpu=True), large[:1]) == []
    with pytest.raises(ConfigError, match=f"left out on a CPU.*full name, as --only {large[0]} or --only"):
        kernels.too_large(kernels.chosen(["c2048"], cpu=True), ["c2048"])
    found = kernels.not_measured("attention", LARGE, {"triton": "needs a GPU"})
    assert found["bytes"] == 64 * 2048 * 2 * 32 * 128 * 2
    assert "left out: large" in kernels.row("x", found, Bandwidth(1e9, 1), 10)


def test_a_case_has_one_dtype_on_a_cpu_however_it_is_asked_for():
    unasked, on_gpu = kernels.chosen(None, cpu=True), kernels.chosen(None)
    assert {case.dtype for _, case in unasked.values()} == {"float32"} and len(unasked) == len(on_gpu)
    assert {case.dtype for _, case in on_gpu.values()} == {"bfloat16"}
    for name, entry in unasked.items():
        assert kernels.chosen([name], cpu=True)[name] == entry
    by_its_name_on_a_gpu = kernels.chosen(["shrink/llama2-7b.qkv-t8-r16-distinct-bfloat16"], cpu=True)
    assert by_its_name_on_a_gpu.items() <= unasked.items() and len(by_its_name_on_a_gpu) == 1
    assert kernels.chosen(["attention/float16"], cpu=True)["attention/float16"][1].dtype == "float16"
    with pytest.raises(ConfigError, match="no case has that"):
        kernels.chosen(["llama2-7b.qkv-t8-r16-distinct-float32"])  # a name on a CPU alone


def test_names():
    assert list(kernels.chosen(["attention/tiny"])) == ["attention/tiny"]
    assert len(kernels.chosen(["expand/tiny.odd", "attention/tiny"])) == 4
    with pytest.raises(ConfigError, match="(?s)--only nope: no case.*shrink/llama2-7b.*attention/float16"):
        kernels.chosen(["tiny", "nope"])
    assert kernels.short(["m-b8-c256", "m-b64-c256"]) == ["b8-c256", "b64-c256"]
    assert kernels.short(["a-b-c", "a-d-c"]) == ["b", "d"] and kernels.short(["a-b"]) == ["a-b"]
    assert kernels.short(["a-b", "a-b-c"]) == ["a-b", "a-b-c"]


def test_whole_run(capsys, tmp_path):
    figure = tmp_path / "figure.png"
    arguments = "kernels --only expand/tiny.odd-t7- --only attention/tiny --num-iters 3 --device cpu --disable-tqdm"
    assert main(["bench", *arguments.split(), "--plot", str(figure)]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert list(result["cases"]) == ["expand/tiny.odd-t7-r8-uniform-float32", "attention/tiny"]
    for found in result["cases"].values():
        assert found["triton"] == {"not_run": "needs a GPU"} and len(found["xla"]["rounds_us"]) == 3
        rate = found["bytes"] / found["xla"]["us"] / 1e3
        assert found["xla"]["gb_per_second"] == pytest.approx(rate)
        assert found["xla"]["share"] == pytest.approx(rate * 1e9 / result["read_bandwidth"]["bytes_per_second"])
    assert sum("needs a GPU" in line for line in lines[:-1]) == 2 and lines[0].startswith("Read bandwidth")
    assert figure.stat().st_size > 1000 and result["hardware"]["platform"] == "cpu"


def test_a_figure_of_what_reads_nothing():
    case = {"bytes": 0, "triton": {"not_run": "x"}, "xla": {"us": 2.0, "gb_per_second": None}}
    (panel,) = kernels.chart({"read_bandwidth": {"bytes_per_second": None}, "cases": {"shrink/a": case}})
    assert (panel.unit, panel.series, list(panel.labels)) == ("us", {"xla": [2.0]}, ["shrink/a"])


def test_labels_of_bars_are_plain_numbers():
    from lora_jax.bench import plot

    assert [plot._label(x, "GB/s") for x in (1556.2, 999.7, 31.25, 0.5)] == ["1556", "1000", "31.2", "0.5"]


def test_the_timed_programs_on_a_gpu():
    """One kernel a call, all in one CUDA graph, and no copy of weights, pages or y."""
    calls = 6
    found = run_compiler("tests.support.compile_bench_kernels", "h200", str(calls))
    for op in ("shrink", "expand", "attention"):
        assert found[op]["kernels"] == calls, op
        assert found[op]["command_buffers"] == 1, op
        assert found[op]["temp_bytes"] < 1 << 20, op


def test_the_cases_differ_from_those_compared_with_float64():
    """So large ones stay out of the tests that compute them in float64."""
    assert not {c.name for c in TIMED_ATTENTION} & {c.name for c in ATTENTION_CASES}
    assert isinstance(LARGE, AttentionCase) and jax.default_backend() == "cpu"


@pytest.mark.device
def test_on_a_gpu(capsys):
    """Nothing is read faster than memory allows, so no cache serves the loop; and the host does not hold it up."""
    arguments = (
        "kernels --only attention/llama2-7b-b64-c2048 --only shrink/llama2-7b.qkv-t64-r16-distinct --num-iters 5"
    )
    assert main(["bench", *arguments.split(), "--disable-tqdm"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["cases"]) == 2
    for name, found in result["cases"].items():
        assert 0 < found["triton"]["share"] < 1.05 and 0 < found["xla"]["share"] < 1.05, name
        assert not found["triton"]["host_bound"], name
