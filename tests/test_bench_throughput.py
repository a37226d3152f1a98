"""Request lists and the throughput benchmark: arithmetic against a hand-made engine, and one whole run."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from lora_jax.bench import throughput, workload
from lora_jax.bench.cli import add_subcommands
from lora_jax.bench.workload import Item
from lora_jax.cli import main
from lora_jax.cli_args import OptionParser
from lora_jax.config import EngineArgs
from lora_jax.errors import ConfigError, EngineDeadError, LoraJaxError
from lora_jax.request import LoRARequest, SamplingParams, StepOutput

TINY = ["throughput", "--model", "tiny", "--load-format", "dummy"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = OptionParser()
    add_subcommands(parser)
    return parser.parse_all([*TINY, *arguments])


def items_of(*arguments: str, seed: int = 0, vocab: int = 500, adapters: int = 0) -> list[Item]:
    options = parse(*arguments)
    return workload.random_items(options, options.num_prompts, adapters, vocab, seed)


def test_a_list_is_the_same_for_the_same_seed():
    arguments = (
        "--num-prompts 40 --input-len 50 --output-len 30 --random-range-ratio 0.5 --lora-assignment zipf".split()
    )
    one = items_of(*arguments, adapters=5)
    assert one == items_of(*arguments, adapters=5)
    other = items_of(*arguments, adapters=5, seed=1)
    assert [len(i.prompt_token_ids) for i in one] != [len(i.prompt_token_ids) for i in other]
    wider = items_of(*arguments, adapters=5, vocab=1 << 20)
    shape = [(len(i.prompt_token_ids), i.output_len, i.adapter) for i in one]
    assert shape == [(len(i.prompt_token_ids), i.output_len, i.adapter) for i in wider]
    assert max(max(i.prompt_token_ids) for i in one) < 500 <= max(max(i.prompt_token_ids) for i in wider)


def test_lengths_fill_their_range():
    lengths = workload.random_lengths(100, 0.1, 5000, np.random.default_rng(0))
    assert set(lengths.tolist()) == set(range(90, 111))
    assert set(workload.random_lengths(7, 0.0, 50, np.random.default_rng(0)).tolist()) == {7}
    assert workload.random_lengths(1, 0.9, 500, np.random.default_rng(0)).min() == 1
    assert {len(i.prompt_token_ids) for i in items_of("--num-prompts", "9", "--input-len", "4")} == {4}


def test_assignments():
    def who(name, share=1.0, number=3000):
        return workload.assign_adapters(name, number, 4, share, np.random.default_rng(0))

    assert who("distinct")[:6] == [0, 1, 2, 3, 0, 1]
    half = [a for a in who("distinct", 0.5) if a is not None]
    assert half[:6] == [0, 1, 2, 3, 0, 1] and 1400 < len(half) < 1600
    assert who("none") == [None] * 3000 and who("uniform", 0.0) == [None] * 3000
    zipf = Counter(who("zipf"))
    for k in range(4):  # weights 1, 1/2, 1/3, 1/4
        assert zipf[k] / 3000 == pytest.approx(1 / (k + 1) / (25 / 12), abs=0.03)
    assert all(abs(n - 750) < 90 for n in Counter(who("uniform")).values())
    with pytest.raises(ValueError, match="assignment"):
        who("other")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--random-range-ratio 1", "must be below 1"),
        ("--random-range-ratio nan", "must be >= 0"),
        ("--lora-share 1.5", r"in \[0, 1\]"),
        ("--lora-assignment all", "invalid choice"),
        ("--num-prompts 0", "must be >= 1"),
    ],
)
def test_wrong_options_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse(*arguments.split())


def test_an_assignment_needs_adapters():
    with pytest.raises(ConfigError, match="zipf needs adapters"):
        items_of("--num-prompts", "2", "--lora-assignment", "zipf")
    for share in ("0.7", "0.5", "0"):
        with pytest.raises(ConfigError, match=f"--lora-share {float(share)} needs adapters"):
            items_of("--num-prompts", "2", "--lora-share", share)
    with pytest.raises(ConfigError, match=r"--lora-share 1.0 and --lora-assignment none exclude"):
        items_of("--num-prompts", "2", "--lora-share", "1", "--lora-assignment", "none", adapters=2)
    some = [i.adapter for i in items_of("--num-prompts", "1000", adapters=2)]
    assert 650 < 1000 - some.count(None) < 750
    assert None not in [i.adapter for i in items_of("--num-prompts", "9", "--lora-share", "1", adapters=2)]


def test_the_line_on_adapters():
    result = dict.fromkeys("requests_per_second total_tokens_per_second output_tokens_per_second".split(), 1.0)
    result |= dict.fromkeys("prompt_tokens output_tokens steps preemptions slot_writes prefix_cache_hits".split(), 1)
    result |= dict(wall_seconds=1.5, num_prompts=8, ttft_median=0.1, ttft_p99=0.1, num_loras=2)
    line = throughput.table(result | dict(requests_with_adapter=5, distinct_adapters=1))[3]
    assert line == "Time: 1.500 s for 8 requests, 5 of them with an adapter: 1 of 2 drawn"
    line = throughput.table(result | dict(requests_with_adapter=0, distinct_adapters=0, num_loras=0))[3]
    assert line == "Time: 1.500 s for 8 requests"


def test_help_tells_the_number_of_prompts(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "throughput", "--help"])
    assert "requests (default: 128, or all of a workload)" in " ".join(capsys.readouterr().out.split())


def lines(path, *entries):
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries))
    return str(path)


def test_a_file_is_run_exactly_as_it_stands(tmp_path):
    """512 ragged requests, made by other code than ours."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(128, 513, (512, 2)).tolist()
    given = [
        (rng.integers(1000, 31000, n).tolist(), out, i % 32 if i % 3 else None) for i, (n, out) in enumerate(sizes)
    ]
    path = lines(tmp_path / "w", *(dict(prompt_token_ids=p, output_len=n, adapter=a) for p, n, a in given))
    read = workload.read(path, 32000, seed=9)
    assert [(list(i.prompt_token_ids), i.output_len, i.adapter) for i in read] == given
    assert workload.longest(read) == max(len(p) + n for p, n, _ in given)
    assert workload.read(path, 32000, seed=9, limit=10) == read[:10]
    workload.write(read, str(tmp_path / "again"))
    assert workload.read(str(tmp_path / "again"), 32000, seed=0) == read


def test_lengths_alone_in_a_file_give_random_prompts(tmp_path):
    path = lines(
        tmp_path / "w", {"prompt_len": 300, "output_len": 2}, "", {"prompt_len": 7, "output_len": 1, "adapter": 0}
    )
    one = workload.read(path, 50, seed=1)
    assert [(len(i.prompt_token_ids), i.output_len, i.adapter) for i in one] == [(300, 2, None), (7, 1, 0)]
    assert max(one[0].prompt_token_ids) < 50 and one == workload.read(path, 50, seed=1) != workload.read(
        path, 50, seed=2
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 .*"),
        ("[]", "no JSON object"),
        ({"prompt_len": 3}, "output_len must be an integer in \\[1, .*, got None"),
        ({"prompt_len": 0, "output_len": 1}, "prompt_len must be"),
        ({"prompt_len": True, "output_len": 1}, "prompt_len must be"),
        ({"prompt_len": 1, "prompt_token_ids": [1], "output_len": 1}, "either"),
        ({"output_len": 1}, "either"),
        ({"prompt_token_ids": [], "output_len": 1}, "at least one"),
        ({"prompt_token_ids": [10], "output_len": 1}, "10 is outside the vocabulary of 10"),
        ({"prompt_token_ids": [1.5], "output_len": 1}, "1.5"),
        ({"prompt_len": 1, "output_len": 1, "adapter": -1}, "adapter must be"),
        ({"prompt_len": 1, "output_len": 1, "lora": 1}, "unknown field 'lora'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, words):
    path = lines(tmp_path / "w", {"prompt_len": 1, "output_len": 1}, line)
    with pytest.raises(ConfigError, match=f"line 2 of the workload .*{words}" if words[0] != "l" else words):
        workload.read(path, 10, seed=0)


def test_a_file_that_is_missing_or_short(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        workload.read(str(tmp_path / "none"), 10, seed=0)
    with pytest.raises(ConfigError, match="holds 0 requests"):
        workload.read(lines(tmp_path / "empty"), 10, seed=0)
    with pytest.raises(ConfigError, match="holds 1 requests, 2 are asked for"):
        workload.read(lines(tmp_path / "one", {"prompt_len": 1, "output_len": 1}), 10, seed=0, limit=2)


# ---- the engine's options ----
ITEMS = [Item((1,) * 10, 5, 2), Item((1,) * 3, 4, None)]


def settled(*arguments: str, items=ITEMS, **given) -> EngineArgs:
    return throughput.engine_arguments(EngineArgs(model="tiny", **given), parse(*arguments), items)


def test_engine_options_that_follow_from_the_list():
    args = settled("--lora-rank", "4")
    assert (args.max_model_len, args.enable_lora, args.max_cpu_loras, args.max_lora_rank) == (15, True, 32, 4)
    assert settled("--num-loras", "50").max_cpu_loras == 50
    base = settled(items=ITEMS[1:])
    assert (base.max_model_len, base.enable_lora) == (7, False)
    assert settled("--num-loras", "1", items=ITEMS[1:]).enable_lora  # adapters that nobody asks for
    assert settled(items=ITEMS[1:], max_model_len=99).max_model_len == 99


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="15 tokens: --max-model-len 14"):
        settled(max_model_len=14)
    with pytest.raises(ConfigError, match="adapter 2, so 3 are needed"):
        settled("--num-loras", "2")
    with pytest.raises(ConfigError, match="3 adapters do not fit in --max-cpu-loras 2"):
        settled(max_loras=1, max_cpu_loras=2)
    for option, value in (("--lora-assignment", "zipf"), ("--input-len", "5"), ("--lora-share", "1")):
        with pytest.raises(ConfigError, match=f"{option} and --workload exclude each other"):
            throughput.requests(parse("--workload", "x", option, value), EngineArgs("tiny", load_format="dummy"))


# ---- measuring ----
class FakeEngine:
    """Two requests at a time. A step takes a second and returns the tokens of the step before it; one useless step is begun
    at the end. `wrong` replaces an output."""

    def __init__(self, wrong: StepOutput | None = None, cut: int = 0):
        self.now, self.waiting, self.running, self.flight, self.seen = 50.0, [], [], None, []
        self.wrong, self.cut, self.steps = wrong, cut, 3

    def stats(self):
        return dict(steps=self.steps, preemptions=7, slot_writes=2, failed_steps=0, prefix_cache_hits=0)

    def make_request(self, prompt, params, lora_request):
        self.now += 0.25
        name = f"r{len(self.seen)}"
        self.seen.append((prompt, params, lora_request))
        return SimpleNamespace(request_id=name, left=params.max_tokens - self.cut)

    def add_request(self, request):
        self.waiting.append(request)

    def has_unfinished(self):
        return bool(self.waiting or self.running or self.flight is not None)

    def step(self):
        self.now, self.steps = self.now + 1, self.steps + 1
        before, self.flight = self.flight, None
        while self.waiting and len(self.running) < 2:
            self.running.append(self.waiting.pop(0))
        if self.running:
            self.flight = []
            for request in list(self.running):
                request.left -= 1
                done = not request.left
                self.flight.append(StepOutput(request.request_id, [5], finish_reason="length" if done else None))
                if done:
                    self.running.remove(request)
        elif before:
            self.flight = []
        return [self.wrong] if self.wrong else list(before or [])


def test_times_counts_and_adapters():
    engine, ended = FakeEngine(), []
    items = [Item((1, 2), 2, 1), Item((3,), 1), Item((4, 4, 4), 1, 0)]
    loras = [LoRARequest("a"), LoRARequest("b")]
    got = throughput.measure(
        engine, items, SamplingParams(temperature=0), loras, lambda: ended.append(engine.now), lambda: engine.now
    )
    # 0.75 s of handing over; tokens of the steps at 1, 2 come at 2, 3 s; the useless fourth step is not part of the time
    assert got.first == [2.75, 2.75, 3.75] and got.wall == 3.75
    assert got.done == [(2.75, 2), (3.75, 4)]
    assert (got.prompt_tokens, got.output_tokens) == (6, 4)
    assert got.counters == dict(steps=4, preemptions=0, slot_writes=0, failed_steps=0, prefix_cache_hits=0)
    assert ended == [52.75, 53.75, 53.75] and not engine.has_unfinished()
    assert [lora and lora.lora_name for _, _, lora in engine.seen] == ["b", None, "a"]
    assert [p.max_tokens for _, p, _ in engine.seen] == [2, 1, 1]


def test_a_failed_request_and_a_short_answer_stop_the_benchmark():
    with pytest.raises(EngineDeadError, match="gone"):
        throughput.measure(FakeEngine(StepOutput("r0", error=EngineDeadError("gone"))), ITEMS[1:], SamplingParams(), [])
    with pytest.raises(LoraJaxError, match="r0 got 3 tokens of 4"):
        throughput.measure(FakeEngine(cut=1), ITEMS[1:], SamplingParams(), [])


def test_thinned_points_keep_both_ends():
    points = [(float(i), i) for i in range(1000)]
    some = throughput.thinned(points, 50)
    assert len(some) == 50 and some[0] == [0.0, 0] and some[-1] == [999.0, 999]
    assert throughput.thinned(points[:3]) == [[0.0, 0], [1.0, 1], [2.0, 2]]


def test_whole_run_of_a_file(tmp_path, capsys):
    """Three adapters, one slot, too few pages: so slots are written and requests preempted."""
    sizes = [(20, 9, 0), (5, 14, None), (17, 12, 1), (9, 8, 2), (22, 10, None), (3, 7, 1)]
    path = lines(tmp_path / "w", *(dict(prompt_len=p, output_len=o, adapter=a) for p, o, a in sizes))
    out, figure = tmp_path / "result.json", tmp_path / "figure.png"
    arguments = [
        *TINY,
        "--workload",
        path,
        "--lora-rank",
        "4",
        "--max-loras",
        "1",
        "--save-workload",
        str(tmp_path / "saved"),
    ]
    arguments += "--max-num-seqs 4 --num-pages 6 --page-size 8 --max-num-batched-tokens 32 --num-warmups 1".split()
    arguments += ["--device", "cpu", "--disable-tqdm", "--compilation-cache-dir", ""]
    assert main(["bench", *arguments, "--json", str(out), "--plot", str(figure)]) == 0
    shown = capsys.readouterr().out.splitlines()
    result = json.loads(shown[-1])
    assert result == json.loads(out.read_text()) and figure.stat().st_size > 1000
    tokens, outputs = sum(p + o for p, o, _ in sizes), sum(o for _, o, _ in sizes)
    assert (result["num_prompts"], result["prompt_tokens"], result["output_tokens"]) == (6, tokens - outputs, outputs)
    wall = result["wall_seconds"]
    assert result["total_tokens_per_second"] == pytest.approx(tokens / wall)
    assert result["requests_per_second"] == pytest.approx(6 / wall)
    assert f"{outputs / wall:.2f} output tokens/s" in shown[0] and shown[0].startswith("Throughput: ")
    assert (result["requests_with_adapter"], result["distinct_adapters"], result["num_loras"]) == (4, 3, 3)
    assert result["slot_writes"] >= 2 and result["preemptions"] >= 1 and result["failed_steps"] == 0
    assert result["compilations_after_warmup"] == 0 and result["engine"]["max_num_seqs"] == 4
    assert 0 < result["ttft_median"] <= result["ttft_p99"] <= wall
    assert result["output_tokens_over_time"][-1] == [pytest.approx(wall), outputs]
    assert result["hardware"]["platform"] == "cpu"
    saved = workload.read(str(tmp_path / "saved"), 1 << 20, seed=5)
    assert [(len(i.prompt_token_ids), i.output_len, i.adapter) for i in saved] == sizes
