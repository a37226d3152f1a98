"""`bench kernels MODEL` and --autotune: what is timed, which tiles win, what is stored. On a CPU, where kernels are interpreted."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels.candidates import LARGEST_CARD, SMALLEST_CARD
from lora_jax.kernels.cases import AttentionCase
from lora_jax.kernels.tuned import RULES, Key, TileTable

from lora_jax import kv_cache
from lora_jax.bench import autotune, kernel_timing, kernels, layer_ops
from lora_jax.bench.autotune import Programs, Search
from lora_jax.bench.kernel_timing import Timing
from lora_jax.bench.layer_ops import LayerOp
from lora_jax.bench.machine import Bandwidth
from lora_jax.builder import one_layer_spec
from lora_jax.cli import main
from lora_jax.config import EngineArgs
from lora_jax.device import DeviceSetup, set_up_device
from lora_jax.models import layers
from lora_jax.models.shapes import SHAPES
from lora_jax.tiles import read_tiles, table_name, write_tiles
from tests.support.gpu_program import run_compiler

OPTIONS = "--model tiny --load-format dummy --max-num-seqs 2 --max-loras 2 --max-lora-rank 8 --max-model-len 64 --disable-tqdm"
TINY = dict(model="tiny", load_format="dummy", max_num_seqs=2, max_loras=2, max_lora_rank=8, max_model_len=64)
DOWN = Key("matmul_tiles", (2, 512, 64, 4, False))


@pytest.fixture
def setup() -> DeviceSetup:
    return set_up_device("cpu", "xla", 0.9)


@pytest.fixture(autouse=True)
def shape(monkeypatch):
    """The shape "tiny" with a wider MLP, and a tile of columns in one of q, k and v."""
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "num_key_value_heads": 4, "intermediate_size": 512})


@pytest.fixture
def interpreted(setup, monkeypatch, tmp_path):
    """The kernels, interpreted; one small set of weights; a file of tiles in tmp_path."""
    for name in ("add_rms_norm", "skinny_matmul", "skinny_lora_matmul", "swiglu", "lora_swiglu", "residual_matmul"):
        monkeypatch.setattr(layers, name, functools.partial(getattr(layers, name), interpret=True))
    monkeypatch.setattr(kv_cache, "decode_attention", functools.partial(kv_cache.decode_attention, interpret=True))
    monkeypatch.setattr(kernel_timing, "CPU_ROTATION", 1)
    triton = dataclasses.replace(setup, implementation="triton")
    monkeypatch.setattr(autotune, "set_up_device", lambda *args: triton)
    monkeypatch.setattr(autotune, "tiles_file", lambda cache: tmp_path / "tiles.json")
    return triton


def spec_of(setup, **changes):
    return one_layer_spec(EngineArgs(**{**TINY, "enable_lora": True, **changes}), setup, None, TileTable())


def run(arguments: str, capsys) -> tuple[dict, str]:
    assert main(["bench", "kernels", *arguments.split()]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(lines)


# ---- what is timed ---------------------------------------------------------------------------------------------------
def test_bytes_by_hand(setup):
    """Of Llama-2-7B's shape in bfloat16, 8 rows, 8 adapters of rank 16."""
    args = EngineArgs(model="llama-2-7b", load_format="dummy", max_num_seqs=8, max_model_len=256, dtype="bfloat16")
    spec = one_layer_spec(dataclasses.replace(args, enable_lora=True), setup, None, TileTable())
    size = {op.name: op.must_read() for op in layer_ops.layer_ops(spec, (8,))}
    assert size["decode[8] qkv"] == 4096 * 3 * 4096 * 2
    assert size["decode[8] o"] == (4096 * 4096 + 4096) * 2  # and the scale of the norm after it
    assert size["decode[8]+lora gate_up"] - size["decode[8] gate_up"] == 8 * 16 * (2 * 4096 + 2 * 11008) * 2
    assert size["decode[8] attention"] == 8 * 128 * 2 * 32 * 128 * 2
    assert len(size) == 9
    op = LayerOp(spec, "o", 8)
    assert 256 << 20 < op.calls(on_gpu=True) * op.must_read() < 1 << 30 and op.calls(on_gpu=False) == 1


def test_steps_for_few_items_are_timed_full(setup):
    """With as many of the largest adapters as they have room for: 8 items are none of rank 256."""
    triton = dataclasses.replace(setup, implementation="triton")
    names = lambda rank: {  # noqa: E731
        op.name: op.adapters
        for op in layer_ops.layer_ops(spec_of(triton, max_num_seqs=64, max_loras=32, max_lora_rank=rank), (64,))
        if op.kind == "qkv"
    }
    assert names(16) == {"decode[64] qkv": 0, "decode[64]+lora qkv": 32, "decode[64]+lora[8] qkv": 8}
    assert names(256) == {"decode[64] qkv": 0, "decode[64]+lora qkv": 32, "decode[64]+lora[64] qkv": 4}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("lora", [False, True])
def test_every_op_as_kernels_and_in_plain_jax(rows, lora, interpreted, setup):
    for kind in layer_ops.KINDS[: 4 if lora else 5]:
        results = []
        for where in (setup, interpreted):
            op = LayerOp(spec_of(where), kind, rows, lora)
            given = op.operands(1, 2)
            fixed = {**given.fixed, "normed": layers.array(given.fixed["normed"])}
            fixed["qkv"] = jnp.ones((rows, 192)) * 0.01 if kind == "attention" else None
            program = op.program()
            out, _ = program({k: v for k, v in fixed.items() if v is not None}, tuple(given.rotating[:2]), given.carry)
            results.append([layer_ops.settled(one) for one in out])
        for plain, fused in zip(*results, strict=True):
            for a, b in zip(plain, fused, strict=True):
                assert np.abs(a).max() > 1e-5
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * np.abs(a).max())
        assert kind == "attention" or any((a != b).any() for a, b in zip(*results[0], strict=True)), "equal weights"


def test_adapters_are_part_of_it(interpreted):
    spec = spec_of(interpreted)
    for kind in layer_ops.KINDS[:4]:
        (plain, *_), (with_adapters, *_) = (
            layer_ops.settled(op.program()(given.fixed, tuple(given.rotating), given.carry)[0][0])
            for op in (LayerOp(spec, kind, 2), LayerOp(spec, kind, 2, lora=True))
            for given in [op.operands(1, 1)]
        )
        assert np.abs(plain - with_adapters).max() > 1e-4 * np.abs(plain).max(), kind


def test_each_call_has_adapters_of_its_own(setup):
    """As layers of a model have: the kernels count what is done for each layer."""
    op = LayerOp(spec_of(setup), "down", 2, lora=True)
    given = op.operands(1, 2)
    _, values, stacks = given.rotating[0]
    entries = tuple((jnp.int32(number), values, stacks) for number in (0, 1, 0))
    first, second, again = (layer_ops.settled(out)[0] for out in op.program()(given.fixed, entries, given.carry)[0])
    assert (first == again).all() and (first != second).any()
    assert [int(number) for number, *_ in given.rotating] == [0, 1]


def test_the_programs_on_a_gpu():
    """As many kernels as calls, all in one CUDA graph, pages and weights not copied."""
    calls, found = 4, run_compiler("tests.support.compile_layer_ops", "h200", "4")
    for name, summary in found.items():
        a_call = 2 if " qkv" in name else 1
        assert a_call * calls <= summary["kernels"] <= a_call * calls + 4, (name, summary)
        assert summary["command_buffers"] == 1 and summary["temp_bytes"] < 8 << 20, (name, summary)
    assert len(found) == 3


# ---- the search ------------------------------------------------------------------------------------------------------
def faster(changes: dict[str, int], by: float = 0.5):
    """Seconds of programs: less the more of these values the tiles of `DOWN` have."""

    def seconds(self, ready, rounds):
        return {
            table: 1.0
            - by
            * sum(getattr(table.get(DOWN) or RULES[DOWN.rule](*DOWN.arguments), k) == v for k, v in changes.items())
            for table in ready
        }, False

    return seconds


def test_a_choice_that_is_faster_is_stored_and_then_shown(interpreted, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Search, "_seconds", faster({"block_k": 64, "parts": 2}, 0.3))
    result, lines = run(f"--autotune {OPTIONS} --only down --only attention --batch-size 2", capsys)
    want = dataclasses.replace(RULES[DOWN.rule](*DOWN.arguments), block_k=64, parts=2)  # two steps from the rule's
    table = read_tiles(tmp_path / "tiles.json", table_name(interpreted.device))
    assert table.by_key == {DOWN: want} and result["table"]["entries"] == 1
    down = result["ops"]["decode[2] down"]
    assert down["heuristic_us"] == 1e6 and down["tuned_us"] == pytest.approx(0.4e6) and down["tried"] >= 4
    assert down["tiles"][0]["tiles"] == dataclasses.asdict(want)
    others = [one for name, one in result["ops"].items() if name != "decode[2] down"]
    assert len(others) == 2 and not any(one["tuned_us"] or one["failed"] for one in others)
    assert "matmul: block_k 32->64, parts 1->2" in lines and "1 of " in lines and result["left_out"] == []
    # the same command without --autotune shows both
    result, lines = run(f"{OPTIONS} --only down --only attention --batch-size 2", capsys)
    assert result["ops"]["decode[2] down"]["tuned_us"] == pytest.approx(0.4e6) and "block_k 32->64" in lines
    assert result["ops"]["decode[2] attention"]["tuned_us"] is None and "1 entries" in lines.splitlines()[0]
    # and a search in which the rule wins takes the entry back
    monkeypatch.setattr(Search, "_seconds", faster({"block_k": 64}, 0.019))
    result, _ = run(f"--autotune {OPTIONS} --only down --no-enable-lora", capsys)
    assert not read_tiles(tmp_path / "tiles.json", table_name(interpreted.device)).entries
    assert list(result["ops"]) == ["decode[2] down", "decode[1] down"]


def test_what_does_not_compile_or_gives_other_numbers_is_left_out(interpreted, monkeypatch):
    made, compiled, settled = [], kernel_timing.compiled, layer_ops.settled

    def failing(lowered, setup):
        made.append(lowered)
        if len(made) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: shared memory")
        return compiled(lowered, setup)

    def wrong(result):
        numbers.append(result)
        return [x * (1.001 if len(numbers) == 2 else 1) for x in settled(result)]

    numbers: list = []
    monkeypatch.setattr(kernel_timing, "compiled", failing)
    monkeypatch.setattr(autotune, "settled", wrong)
    monkeypatch.setattr(autotune.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(Search, "_seconds", lambda self, ready, rounds: (dict.fromkeys(ready, 1.0), False))
    search = Search(interpreted, 3, time.perf_counter() + 60)
    found = search.tune(LayerOp(spec_of(interpreted), "down", 2))
    assert found.failed == 2 and found.tuned is None and len(made) == 4 and DOWN in search.decided


def test_a_program_that_is_another_ones_is_not_timed(interpreted):
    """The rule of products is also asked whether gate and up take adapters; its other sizes change nothing there."""
    programs = Programs(LayerOp(spec_of(interpreted), "gate_up", 2, lora=True), interpreted, TileTable())
    key = next(key for key in programs.keys if key.rule == "matmul_tiles")
    own = RULES[key.rule](*key.arguments)
    same = TileTable.of({key: dataclasses.replace(own, num_warps=8)})
    assert list(programs.compile([TileTable(), same])) == [TileTable()] and not programs.failed


def test_numbers_agree_within_the_dtype():
    want = [np.array([1.0, -2.0, 0.5], np.float32)]
    assert autotune.agree([want[0] + 0.03], want, jnp.bfloat16)
    assert not autotune.agree([want[0] + 0.07], want, jnp.bfloat16)
    assert not autotune.agree([want[0] + 1e-4], want, jnp.float32)
    assert not autotune.agree([want[0] * np.nan], want, jnp.float32)


def test_rounds_alternate_and_the_hopeless_drop_out(monkeypatch):
    seconds, ran = {"a": 1.0, "b": 1.04, "c": 2.0}, []

    class Fake:
        def __init__(self, name):
            self.name = name

        def calibrate(self):
            pass

        def round(self):
            ran.append(self.name)
            return Timing(seconds[self.name], False)

    tables = {TileTable.of({Key("x", (name,)): 1}): Fake(name) for name in seconds}
    search = Search(None, 5, 0.0)
    fastest = search._fastest(tables)
    assert tables[fastest].name == "a" and ran.count("c") == 3 and ran.count("a") == ran.count("b") == 8
    assert ran[:6] == ["a", "b", "c", "b", "c", "a"]


def test_shared_memory_of_a_card(setup):
    card = lambda found: dataclasses.replace(setup, device=type("D", (), {"compute_capability": found})())  # noqa: E731
    room = {c: Search(card(c), 1, 0.0).shared for c in ("8.0", "8.9", "9.0", "12.0")}
    assert room == {"8.0": 163 << 10, "8.9": SMALLEST_CARD, "9.0": LARGEST_CARD, "12.0": SMALLEST_CARD}


# ---- the command -----------------------------------------------------------------------------------------------------
def test_on_a_cpu_there_is_nothing_to_tune(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_timing, "CPU_ROTATION", 1)
    monkeypatch.setattr(kernel_timing, "CPU_ROUND", 1e-3)
    figure = tmp_path / "figure.png"
    result, lines = run(f"--autotune {OPTIONS} --device cpu --batch-size 2 --num-iters 2 --plot {figure}", capsys)
    assert "nothing to tune" in lines.splitlines()[0] and len(result["ops"]) == 9 and figure.stat().st_size > 1000
    assert all(one["heuristic_us"] > 0 and one["tuned_us"] is None for one in result["ops"].values())
    assert result["table"]["entries"] == 0 and "left_out" in result and result["num_iters"] == 2


def test_a_limit_of_time_leaves_ops_out(interpreted, capsys, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(Search, "_seconds", faster({}))
    result, lines = run(f"{OPTIONS} --max-seconds 3 --no-enable-lora", capsys)
    assert list(result["ops"]) == ["decode[2] qkv", "decode[2] o", "decode[2] gate_up"]
    assert len(result["left_out"]) == 7 and "7 ops were not reached, from decode[2] down on" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--autotune", "--autotune is for the decode steps of a model"),
        ("--batch-size 4", "--batch-size is for the decode steps of a model"),
        (f"{OPTIONS} --batch-size 3", "does not run at once with --max-num-seqs 2"),
        (f"{OPTIONS} --only nope", "--only nope: no op has that in its name; there are\n  decode\\[2\\] qkv"),
        (f"{OPTIONS} --lora-modules a=b", "--lora-modules"),
        ("tiny --model other", "two models are named"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    assert main(["bench", "kernels", *arguments.split(), "--device", "cpu"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_buckets():
    assert autotune.buckets(None, (1, 2, 4)) == (4, 2, 1)
    assert autotune.buckets([3, 1, 4], (1, 2, 4, 8)) == (4, 1)


def test_attention_cases_show_a_differing_entry(setup, monkeypatch):
    case = AttentionCase("x", 2, 4, 4, 16, 16, 4, dtype="float32")
    key = Key("attention_tiles", (2, 4, 1, 64, 16, 4))
    own = RULES[key.rule](*key.arguments)
    other = TileTable.of({key: dataclasses.replace(own, num_warps=8)})
    assert kernel_timing.asks_for("attention", case, other)
    assert not kernel_timing.asks_for("attention", case, TileTable.of({key: own}))
    assert not kernel_timing.asks_for("attention", dataclasses.replace(case, rows=3), other)
    assert not kernel_timing.asks_for("shrink", None, other) and not kernel_timing.asks_for("attention", case, None)
    interpreted = functools.partial(kernel_timing.decode_attention, interpret=True)
    monkeypatch.setattr(kernel_timing, "decode_attention", interpreted)
    monkeypatch.setattr(kernel_timing, "CPU_ROTATION", 1)
    found = kernels.measure("attention", case, setup, 2, {}, other)
    assert {"triton", "xla", "tuned"} <= set(found) and found["tuned"]["us"] > 0
    assert "heuristic; tuned" in kernels.row("x", found, Bandwidth(1e9, 1), 5)
    assert "tuned" not in kernels.measure("attention", case, setup, 1, {}, None)


def test_a_table_of_a_file_is_what_the_engine_would_take(tmp_path, interpreted):
    write_tiles(tmp_path / "tiles.json", table_name(jax.devices()[0]), TileTable(), set())
    assert json.loads((tmp_path / "tiles.json").read_text())["tables"] == {table_name(interpreted.device): []}


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(interpreted, monkeypatch, tmp_path, capsys):
    (tmp_path / "tiles.json").mkdir()
    monkeypatch.setattr(autotune.Search, "tune", lambda self, op: pytest.fail("timed"))
    assert main(["bench", "kernels", *OPTIONS.split(), "--autotune"]) == 2
    assert "tiles.json cannot be written" in capsys.readouterr().err


def test_an_interrupted_search_keeps_what_it_found(interpreted, monkeypatch, tmp_path):
    done = []

    def tune(self, op):
        if done:
            raise KeyboardInterrupt
        done.append(op.name)
        return autotune.Found(op, 1e-3, None, {})

    monkeypatch.setattr(autotune.Search, "tune", tune)
    path = tmp_path / "kept.json"
    assert main(["bench", "kernels", *OPTIONS.split(), "--autotune", "--json", str(path)]) != 0
    kept = json.loads(path.read_text())
    assert list(kept["ops"]) == done and len(kept["left_out"]) > 3
