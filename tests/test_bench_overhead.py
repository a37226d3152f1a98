"""`bench overhead`: the arithmetic by hand, that differences are seen, and one whole run on a tiny model with two batch sizes."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest

from lora_jax import dispatch
from lora_jax.bench import adapters, footprint, overhead, overhead_table, plot
from lora_jax.bench.cli import add_subcommands
from lora_jax.bench.overhead import Measured
from lora_jax.bench.paired import Spread, order_of_round, paired_ratios
from lora_jax.bench.rounds import Round
from lora_jax.cli import main
from lora_jax.cli_args import OptionParser
from lora_jax.errors import ConfigError
from lora_jax.models.shapes import known_shape
from lora_jax.request import LoRARequest

COMMON = ["overhead", "--model", "tiny", "--load-format", "dummy"]


def parse(*more: str):
    parser = OptionParser()
    add_subcommands(parser)
    return parser.parse_all([*COMMON, *more])


def test_spread_by_hand():
    assert Spread.of([5.0, 1.0, 2.0, 4.0]) == Spread(median=3.0, q25=1.75, q75=4.25, min=1.0, max=5.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)


def test_ratios_are_of_the_same_round():
    # every round is twice as slow as the one before, for both: the ratio does not see it
    base, values = [1.0, 2.0, 4.0], [1.1, 2.2, 4.4]
    assert paired_ratios(values, base) == pytest.approx([1.1, 1.1, 1.1])
    with pytest.raises(ValueError):
        paired_ratios([1.0], base)


def test_variants_take_turns():
    names = list("abcde")
    orders = [order_of_round(names, i) for i in range(10)]
    assert orders[0] == list("abcde") and orders[1] == list("bcdea") and orders[5] == list("edcba")
    for name in names:
        assert sorted(order.index(name) for order in orders) == sorted([*range(5), *range(5)])
    before_b = {order[order.index("b") - 1] for order in orders if order.index("b")}
    assert before_b == {"a", "c"}, "not always after the same one"


def test_a_round_runs_every_variant_in_its_order(monkeypatch):
    ran = []
    monkeypatch.setattr(overhead, "run_variant", lambda variant, options: ran.append(variant.engine) or variant.engine)
    variants = {name: overhead.Variant(name) for name in ("plain", "before", "after")}
    assert overhead.measure_round(variants, parse(), 1) == {name: name for name in variants}
    assert ran == ["before", "after", "plain"]


def test_prefill_is_the_median_of_several(monkeypatch):
    seconds = iter([9.0, *(float(i) for i in (5, 1, 4, 100, 3, 0, 2, 50, 6))])
    asked = []

    def run_batch(engine, prompts, params, rows):
        asked.append(params.max_tokens)
        return Round(next(seconds), 0.5)

    monkeypatch.setattr(overhead, "run_batch", run_batch)
    engine = SimpleNamespace(model_config=SimpleNamespace(vocab_size=9), tokenizer=None)
    options = parse("--batch-size", "1", "--output-len", "7")
    options.batch_size = 1
    assert overhead.run_variant(overhead.Variant(engine), options) == Measured(Round(9.0, 0.5), 4.0)
    assert asked == [7] + [1] * 9


def test_summary_by_hand():
    """Three rounds, 5 tokens; latency and time to first token in seconds."""
    plain = [Measured(Round(1.0, 0.2), 0.1), Measured(Round(2.0, 0.4), 0.2), Measured(Round(4.0, 0.8), 0.4)]
    lora = [Measured(Round(1.5, 0.3), 0.1), Measured(Round(2.2, 0.6), 0.3), Measured(Round(8.0, 0.8), 0.8)]
    rounds = [{"plain": p, "1 adapter": x} for p, x in zip(plain, lora, strict=True)]
    out = overhead.summarize(rounds, 5, {"plain": ["decode[8]"], "1 adapter": ["decode[8]+lora"]})
    assert out["1 adapter"]["programs"] == ["decode[8]+lora"]
    latency = out["1 adapter"]["latency_ms"]
    assert latency["rounds"] == [1500.0, 2200.0, 8000.0] and latency["median"] == 2200.0
    # 1.5, 1.1, 2.0; not the ratio of the medians, which is 1.1
    expected = dict(median=1.5, q25=1.3, q75=1.75, min=1.1, max=2.0)
    assert latency["ratio_to_plain"] == pytest.approx(expected)
    per_token = out["1 adapter"]["ms_per_output_token"]
    assert per_token["rounds"] == pytest.approx([300.0, 400.0, 1800.0])
    assert per_token["ratio_to_plain"]["median"] == pytest.approx(1.5)  # 1.2 / 0.8, 1.6 / 1.6, 7.2 / 3.2
    assert out["1 adapter"]["ttft_ms"]["ratio_to_plain"]["max"] == pytest.approx(1.5)
    assert out["1 adapter"]["prefill_ms"]["ratio_to_plain"]["median"] == pytest.approx(1.5)
    assert out["plain"]["latency_ms"]["ratio_to_plain"] == dict.fromkeys(expected, 1.0)


def test_a_different_or_missing_program_is_seen():
    rows = [dict(key=key, program_hash=key * 2) for key in ("decode[1]", "decode[2]", "init[1]")]
    more = [*rows, dict(key="decode[1]+lora", program_hash="x")]
    assert overhead.compare_programs(rows, more) == {"equal": 3, "of": 3, "different": []}
    other = [dict(key="decode[1]", program_hash="another"), rows[2]]
    found = overhead.compare_programs(rows, other)
    assert found == {"equal": 1, "of": 3, "different": ["decode[1]", "decode[2]"]}


@pytest.mark.parametrize(
    "more, words",
    [
        ("--batch-size 2 --num-active-loras 3", "needs a row"),
        ("--batch-size 4 1 --num-active-loras 5", "--num-active-loras 5 exceeds --batch-size 4"),
        ("--batch-size 1 0", "--batch-size: must be >= 1, got 0"),
        ("--batch-size", "--batch-size: expected at least one argument"),
        ("--batch-size 20 --num-active-loras 9", "--max-loras as large, not 8"),
        ("--num-active-loras 0", "must be >= 1"),
        ("--num-rounds none", "--num-rounds: must be a whole number, got 'none'"),
        ("--output-len 1", "at least 2"),
        ("--lora-modules a=b", "random adapters"),
        ("--no-specialize-lora", "with and without it"),
        ("--no-enable-lora", "--no-enable-lora: overhead measures with and without LoRA"),
        ("--output-len 128 --max-model-len 64", "--output-len 128 are 160 tokens a row, more than --max-model-len 64"),
        ("--batch-size 1 8 4 --max-num-seqs 4", "8 rows does not run at once with --max-num-seqs 4"),
        ("--lora-rank 32 --max-lora-rank 8", "--lora-rank 32 do not fit --max-lora-rank 8"),
        ("--seed -1", "seed must be >= 0, got -1"),
        ("--plot figure.txt", "must end in one of .png, .svg, .pdf"),
        ("--plot nowhere/figure.png", "nowhere is no folder"),
        ("--json nowhere/out.json", "nowhere is no folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(more, words, capsys, monkeypatch):
    monkeypatch.setattr(overhead, "build_engines", lambda *args: pytest.fail("engines were built"))
    assert main(["bench", *COMMON, *more.split()]) == 2
    assert words in capsys.readouterr().err


def test_the_engines_differ_in_lora_alone():
    options = parse("--batch-size", "4", "--input-len", "30")
    overhead.check(options)
    assert options.num_active_loras == 4, "8 adapters do not fit 4 rows"
    overhead.fill_defaults(options, "cpu")
    assert (options.output_len, options.num_rounds, options.num_iters_warmup) == (16, 5, 1)
    args = overhead.engine_args(options)
    assert [args[name].enable_lora for name in overhead.ENGINES] == [False, True, True]
    assert [args[name].specialize_lora for name in overhead.ENGINES] == [True, True, False]
    same = {(a.num_pages, a.max_model_len, a.max_num_seqs, a.seed, a.max_lora_rank) for a in args.values()}
    assert same == {(4 * (3 + 1) + 1, 46, 4, 0, 16)}
    overhead.check(parse("--max-model-len", "48"))  # enough for a CPU's 16 tokens, and the device is not known yet
    options = parse("--output-len", "9", "--num-pages", "77")
    overhead.check(options)
    overhead.fill_defaults(options, "gpu")
    assert (options.output_len, options.num_rounds) == (9, 20)
    assert {a.num_pages for a in overhead.engine_args(options).values()} == {77}
    assert (overhead.one_batch(options, 3).batch_size, overhead.one_batch(options, 3).num_active_loras) == (3, 3)
    with pytest.raises(ConfigError, match="no model"):
        parser = OptionParser()
        add_subcommands(parser)
        overhead.check(parser.parse_all(["overhead"]))


def test_the_engines_are_sized_for_the_largest_batch():
    options = parse("--batch-size", "1", "64", "8", "--input-len", "30", "--output-len", "16")
    overhead.check(options)
    assert options.batch_size == [1, 64, 8] and options.num_active_loras == 8
    args = overhead.engine_args(options)
    assert {(a.num_pages, a.max_num_seqs) for a in args.values()} == {(64 * (3 + 1) + 1, 64)}
    sizes = [overhead.one_batch(options, size) for size in options.batch_size]
    assert [(o.batch_size, o.num_active_loras) for o in sizes] == [(1, 1), (64, 8), (8, 8)]
    options = parse("--batch-size", "1", "20", "--num-active-loras", "12", "--max-loras", "12")
    overhead.check(options)
    overhead.fill_defaults(options, "cpu")
    assert overhead.engine_args(options)["specialized"].max_loras == 12
    assert parse().batch_size == [8]


class FakeEngine:
    """Runs nothing, remembers what it was asked to run."""

    def __init__(self):
        self.ran: list[tuple[int, int]] = []  # rows, adapters
        self.writes = 0
        self.step_table = SimpleNamespace(report=lambda: [dict(key="decode[8]", hits=len(self.ran), program_hash="x")])
        self.dtype = np.dtype("float32")
        self.model_config = known_shape("tiny")

    def stats(self):
        return {"slot_writes": self.writes}


@pytest.fixture
def fakes(monkeypatch):
    """The engines by name; each run with adapters writes one to a slot and compiles two programs."""
    engines = {name: FakeEngine() for name in overhead.ENGINES}
    compiled = Counter()

    def run_variant(variant, options):
        variant.engine.ran.append((options.batch_size, len(variant.adapters)))
        if variant.adapters:
            variant.engine.writes += 1
            compiled["n"] += 2
        return Measured(Round(1.0, 0.2), 0.1)

    monkeypatch.setattr(overhead, "run_variant", run_variant)
    monkeypatch.setattr(dispatch, "compilations", lambda: compiled["n"])
    monkeypatch.setattr(overhead, "build_engines", lambda args, device: (engines, {}))
    monkeypatch.setattr(
        adapters, "load_random_adapters", lambda engine, n, rank: [LoRARequest(str(i)) for i in range(n)]
    )
    return engines


def test_every_size_is_warmed_up_and_counts_its_own_rounds_alone(fakes):
    options = parse(*"--batch-size 1 8 4 --num-active-loras 6 --num-rounds 5 --num-iters-warmup 2 --device cpu".split())
    overhead.check(options)
    overhead.fill_defaults(options, "cpu")
    requests = [LoRARequest(str(i)) for i in range(6)]
    for size, adapters_of_it in ((1, (1,)), (8, (1, 6)), (4, (1, 4))):
        for engine in fakes.values():
            engine.ran.clear()
        found = overhead.measure_batch(fakes, requests, overhead.one_batch(options, size))
        runs = 2 + 2 + 5  # for its programs, warm-up, measured
        assert Counter(fakes["plain"].ran) == Counter(fakes["ops_left_in"].ran) == {(size, 0): runs}
        assert Counter(fakes["specialized"].ran) == {(size, n): runs for n in (0, *adapters_of_it)}
        assert (found["batch_size"], found["num_active_loras"]) == (size, adapters_of_it[-1])
        assert found["slot_writes_while_measuring"] == 5 * len(adapters_of_it)
        assert found["compilations_while_measuring"] == 2 * 5 * len(adapters_of_it)
        names = [overhead.adapter_variant(n) for n in adapters_of_it]
        assert list(found["variants"]) == ["plain", "before", "after", *names]
        assert all(len(v["latency_ms"]["rounds"]) == 5 for v in found["variants"].values())


def test_adapters_of_other_kinds_are_variants_of_their_own(fakes):
    words = "--batch-size 4 --num-active-loras 3 --more-adapters 64 8,2:q_proj,v_proj --max-loras 9 --num-rounds 2"
    options = parse(*words.split(), "--num-iters-warmup", "0", "--device", "cpu")
    overhead.check(options)
    overhead.fill_defaults(options, "cpu")
    assert overhead.engine_args(options)["specialized"].max_lora_rank == 64
    requests = [LoRARequest(str(i)) for i in range(3)]
    more = dict.fromkeys(options.more_adapters, requests)
    names = list(overhead.measure_batch(fakes, requests, overhead.one_batch(options, 4), more)["variants"])
    assert names[3:] == [
        "1 adapter",
        "3 adapters",
        "3 adapters of rank 64",
        "3 adapters of ranks 2, 8 on q_proj, v_proj",
    ]
    assert [n for _, n in fakes["specialized"].ran].count(3) == 3 * (2 + 2)


def test_an_interrupted_run_has_shown_what_it_measured(fakes, monkeypatch):
    raw = io.BytesIO()
    # block-buffered, as a pipe: what is not flushed does not reach raw
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw, 1 << 20)))
    seen = []
    measure = overhead.measure_batch

    def interrupted(engines, adapters, options, more):
        seen.append(raw.getvalue().decode())
        if options.batch_size == 4:
            raise KeyboardInterrupt
        return measure(engines, adapters, options, more)

    monkeypatch.setattr(overhead, "measure_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        overhead.run(parse(*"--device cpu --batch-size 2 1 4".split()))
    assert seen[0] == "" and len(seen) == 3
    heads = [line for line in seen[2].splitlines() if line.startswith("LoRA overhead")]
    assert ["batch 2," in heads[0], "batch 1," in heads[1], len(heads)] == [True, True, 2]
    assert seen[2].startswith(seen[1]) and "1 adapter" in seen[1]


def test_an_interrupted_run_has_kept_what_it_measured(fakes, monkeypatch, tmp_path):
    measure = overhead.measure_batch

    def interrupted(engines, adapters, options, more):
        if options.batch_size == 4:
            raise KeyboardInterrupt
        return measure(engines, adapters, options, more)

    monkeypatch.setattr(overhead, "measure_batch", interrupted)
    assert main(["bench", *COMMON, *f"--device cpu --batch-size 2 1 4 --json {tmp_path / 'kept.json'}".split()]) != 0
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [batch["batch_size"] for batch in kept["batches"]] == [2, 1] and kept["benchmark"] == "overhead"
    assert kept["identity"]["equal"] == 1 and kept["command"] and kept["hardware"]["platform"] == "cpu"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """(exit code, lines, result, figure) of a run with two rows and two adapters, then with one row."""
    import contextlib

    figure = tmp_path_factory.mktemp("overhead") / "figure.svg"
    arguments = "--device cpu --dtype float32 --batch-size 2 1 --input-len 9 --output-len 4 --num-rounds 3"
    arguments += " --num-iters-warmup 0 --lora-rank 4 --max-num-batched-tokens 18 --disable-tqdm"
    arguments += f" --compilation-cache-dir= --plot {figure}"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), matplotlib.rc_context({"svg.fonttype": "none"}):
        code = main(["bench", *COMMON, *arguments.split()])
    lines = out.getvalue().splitlines()
    return code, lines, json.loads(lines[-1]), figure


def test_whole_run(whole_run):
    code, _, result, _ = whole_run
    assert code == 0
    common = "benchmark model dtype input_len output_len lora_rank num_rounds num_iters_warmup num_pages max_model_len "
    common += "more_adapters max_num_seqs max_loras hardware batches identity memory command versions date"
    assert sorted(result) == sorted(common.split())
    assert [(b["batch_size"], b["num_active_loras"]) for b in result["batches"]] == [(2, 2), (1, 1)]
    for batch, names in zip(result["batches"], (["1 adapter", "2 adapters"], ["1 adapter"]), strict=True):
        variants = batch["variants"]
        assert list(variants) == ["plain", "before", "after", *names]
        plain = [f"decode[{batch['batch_size']}]", "prefill[18]"]
        lora = [f"{key}+lora" for key in plain]
        ran = {name: sorted(v["programs"]) for name, v in variants.items()}
        assert ran == {"plain": plain, "before": lora, "after": plain, **dict.fromkeys(names, lora)}
        for variant in variants.values():
            for quantity in ("latency_ms", "ms_per_output_token", "ttft_ms", "prefill_ms"):
                values, base = (v[quantity]["rounds"] for v in (variant, variants["plain"]))
                assert len(values) == 3 and min(values) > 0
                ratios = Spread.of(paired_ratios(values, base)).as_dict()
                assert variant[quantity]["ratio_to_plain"] == pytest.approx(ratios)
        assert (batch["compilations_while_measuring"], batch["slot_writes_while_measuring"]) == (0, 0)
    assert result["identity"]["different"] == [] and result["identity"]["equal"] == result["identity"]["of"] > 8
    assert (result["num_rounds"], result["max_num_seqs"], result["num_pages"]) == (3, 2, 2 * (1 + 1) + 1)
    assert result["hardware"]["platform"] == "cpu"
    memory = result["memory"]
    assert memory["reason"] == footprint.ON_CPU and memory["second_set_bytes"] is None
    counts = {name: sizes["executables"] for name, sizes in memory["engines"].items()}
    assert all(sizes["driver_bytes"] is None for sizes in memory["engines"].values())
    assert counts["plain"] < counts["ops_left_in"] < counts["specialized"]


def test_each_section_reads_from_plain_to_before_to_after(whole_run):
    _, lines, result, _ = whole_run
    starts = [i for i, line in enumerate(lines) if line.startswith("LoRA overhead")]
    assert ["batch 2," in lines[starts[0]], "batch 1," in lines[starts[1]], len(starts)] == [True, True, 2]
    for start, batch in zip(starts, result["batches"], strict=True):
        head = next(line for line in lines[start:] if line.startswith("median"))
        assert head.split("|")[0].strip() == "median; % over plain of the same round, median"
        assert [cell.strip() for cell in head.split("|")[1:]] == list(overhead_table.TITLES.values())
        row = next(line for line in lines[start:] if line.startswith("latency of the batch"))
        v = batch["variants"]
        assert f"{v['plain']['latency_ms']['median']:.3f}" in row
        for name in ("before", "after"):
            s = v[name]["latency_ms"]
            assert f"{s['median']:.3f}  {100 * (s['ratio_to_plain']['median'] - 1):+.1f} %" in row
    for words in ("by hash", "executables on the device"):  # of the engines: once, after the last section
        assert [i > starts[-1] for i, line in enumerate(lines[:-1]) if words in line] == [True], words
    assert not [line for line in lines if "DIFFERENT" in line or "DISTURBED" in line]


def test_the_figure_has_a_row_for_each_batch_size(whole_run):
    _, _, result, figure = whole_run
    text = figure.read_text()
    assert text.startswith("<?xml")
    panels = overhead_table.chart(result)
    assert [(panel.row, panel.title[:8]) for panel in panels] == [
        (i, f"Batch {n}:") for i, n in ((0, 2), (0, 2), (1, 1), (1, 1))
    ]
    for panel in panels:
        assert panel.title in text
    for row, batch in enumerate(result["batches"]):
        decode, over = panels[2 * row : 2 * row + 2]
        assert decode.series["decode"] == [v["ms_per_output_token"]["median"] for v in batch["variants"].values()]
        ratios = [v["latency_ms"]["ratio_to_plain"]["median"] for v in batch["variants"].values()]
        assert over.series["latency"] == pytest.approx([100 * (r - 1) for r in ratios[1:]])


def test_panels_lie_in_their_rows(tmp_path, monkeypatch):
    """Three panels, two of them in the second row: the place that each was drawn at, from the left and from the top."""
    drawn = {}
    monkeypatch.setattr(plot, "_draw", lambda panel, axes: drawn.update({panel.title: axes.get_subplotspec()}))
    panels = [plot.Panel(title, "v", "u", {}, row=row) for title, row in (("a", 0), ("b", 1), ("c", 1))]
    plot.save(str(tmp_path / "f.svg"), panels, {"benchmark": "x", "versions": {}, "command": None, "date": "today"})
    assert {t: (s.rowspan.start, s.colspan.start) for t, s in drawn.items()} == {"a": (0, 0), "b": (1, 0), "c": (1, 1)}


def test_the_table_tells_of_what_spoils_a_result(whole_run):
    result = json.loads(json.dumps(whole_run[2]))
    batch = result["batches"][1] | {"compilations_while_measuring": 1, "slot_writes_while_measuring": 2}
    text = "\n".join(overhead_table.section(result, batch))
    for words in ("DISTURBED: 1 compilations", "DISTURBED: 2 adapters written"):
        assert words in text
    identity = {"equal": 9, "of": 10, "different": ["decode[2]"]}
    memory = result["memory"] | dict(reason=None, second_set_bytes=3 << 20)
    text = "\n".join(overhead_table.closing(identity, memory))
    for words in ("9/10", "DIFFERENT: decode[2]", "3.0 MiB by the driver (NVML)"):
        assert words in text
