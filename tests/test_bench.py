"""The benchmark's arithmetic against hand-made engines and known models, and one whole run on a tiny model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors import safe_open

from lora_jax import engine as engine_module
from lora_jax.bench import adapters, latency, machine, rounds, traffic
from lora_jax.bench.cli import add_subcommands
from lora_jax.cli import main
from lora_jax.cli_args import OptionParser
from lora_jax.config import EngineArgs
from lora_jax.errors import ConfigError, EngineDeadError
from lora_jax.models.shapes import known_shape
from lora_jax.request import SamplingParams, StepOutput


class FakeEngine:
    """Gives each request one token a step, the last added one from its second step on. Each step takes a second.

    late: tokens come that many calls of `step` after the first, and so many calls more have nothing to give at the end, as in an
    engine that begins steps ahead.
    """

    def __init__(self, error: Exception | None = None, late: int = 0):
        self.now, self.open, self.seen, self.steps, self.error, self.late = 0.0, {}, [], 0, error, late
        self.ahead = 0

    def make_request(self, prompt, params, lora_request):
        self.now += 100.0  # tokenizing and checking is not part of the batch
        return SimpleNamespace(request_id=str(int(self.now / 100)), prompt=prompt, params=params, lora=lora_request)

    def add_request(self, request):
        self.seen.append(request)
        self.open[request.request_id] = request.params.max_tokens
        self.ahead = self.late

    def has_unfinished(self):
        return bool(self.open) or self.ahead > 0

    def step(self):
        self.now += 1.0
        self.steps += 1
        if self.error is not None:
            return [StepOutput("0", error=self.error)]
        if not self.open:
            self.ahead -= 1
        if self.steps <= self.late:
            return []
        late = self.seen[-1].request_id if self.steps == self.late + 1 else None
        out = []
        for name in set(self.open) - {late}:
            self.open[name] -= 1
            out.append(StepOutput(name, token_ids=[7], finish_reason=None if self.open[name] else "length"))
            if not self.open[name]:
                del self.open[name]
        return out


@pytest.mark.parametrize("late", [0, 1])
def test_a_round_is_timed_from_hand_over_to_last_token(late):
    engine = FakeEngine(late=late)
    engine.make_request([0], SamplingParams(max_tokens=5), None)
    names = [None, "a", None]
    params = SamplingParams(max_tokens=5)
    done = rounds.run_batch(engine, [[1], [2], [3]], params, names, clock=lambda: engine.now)
    assert done == rounds.Round(latency=6.0 + late, ttft=2.0 + late)
    assert done.per_token(5) == 1.0 and done.per_token(1) is None
    assert not engine.has_unfinished() and engine.steps == 6 + 2 * late, "what was begun ahead is not left to the next"
    assert [r.lora for r in engine.seen] == names
    assert [r.prompt for r in engine.seen] == [{"prompt_token_ids": [i]} for i in (1, 2, 3)]


def test_a_failed_request_stops_the_benchmark():
    with pytest.raises(EngineDeadError, match="gone"):
        rounds.run_batch(FakeEngine(EngineDeadError("gone")), [[1]], SamplingParams(), [None])


def test_a_request_that_never_ends_is_a_bug():
    engine = FakeEngine()
    engine.add_request = lambda request: None
    with pytest.raises(AssertionError, match="never finished"):
        rounds.run_batch(engine, [[1]], SamplingParams(), [None])


def test_bytes_of_llama_2_7b():
    """Against the published 6,738,415,616 parameters, of which the embedding table (32,000 x 4,096) is not read."""
    config = known_shape("llama-2-7b")
    weights = 2 * (6_738_415_616 - 32_000 * 4_096)
    per_token = 2 * 2 * 32 * 4096
    moved = traffic.decode_step_bytes(config, 2, rows=8, contexts=[33, 34, 159], active_adapters=3, rank=16)
    assert moved.weights == weights
    assert moved.kv == round(8 * per_token * (33 + 34 + 159) / 3)
    # rank 16 on q, k, v, o, gate, up, down: 39,976,960 parameters, as PEFT prints for it
    assert moved.adapters == 3 * 2 * 39_976_960
    assert moved.total == moved.weights + moved.kv + moved.adapters


def test_tied_embeddings_are_read_as_the_head_and_windows_cap_the_context():
    tied = known_shape("smollm2-135m")
    assert traffic.weight_bytes(tied, 4) == 4 * 134_515_008  # the model's published parameter count
    window = known_shape("mistral-7b")
    assert traffic.kv_bytes(window, 2, 10_000) == traffic.kv_bytes(window, 2, 4096) == 4096 * 32 * 2 * 8 * 128 * 2
    assert traffic.kv_bytes(window, 2, 100) == 100 * 32 * 2 * 8 * 128 * 2


def test_random_adapters_differ_and_cover_the_decoder(tmp_path):
    config = known_shape("tiny")
    folders = [adapters.write_random_adapter(tmp_path / str(s), config, 4, s) for s in (1, 2)]
    files = [safe_open(f / "adapter_model.safetensors", "np") for f in folders]
    assert len(files[0].keys()) == config.num_layers * 7 * 2
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    assert files[0].get_slice(name + "A.weight").get_shape() == [4, config.intermediate_size]
    assert files[0].get_slice(name + "B.weight").get_shape() == [config.hidden_size, 4]
    assert not np.array_equal(*(f.get_tensor(name + "B.weight") for f in files))
    settings = json.loads((folders[0] / "adapter_config.json").read_text())
    assert settings["r"] == 4 and len(settings["target_modules"]) == 7


def test_random_adapters_of_a_kind_have_its_linears(tmp_path):
    folder = adapters.write_random_adapter(tmp_path / "a", known_shape("tiny"), 3, 1, ("q_proj", "down_proj"))
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        assert {name.split(".")[-3] for name in file.keys()} == {"q_proj", "down_proj"}
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch-size", "2", "--num-active-loras", "3"], "needs a row"),
        (["--num-active-loras", "3", "--max-loras", "2"], "--max-loras"),
        (["--num-active-loras", "2", "--no-enable-lora"], "--num-active-loras 2 contradicts --no-enable-lora"),
        (["--lora-rank", "32"], "--lora-rank 32 is of active adapters, and there are none"),
        (["--lora-rank", "32", "--enable-lora"], "--lora-rank 32 is of active adapters, and there are none"),
        (["--num-active-loras", "1", "--lora-rank", "32", "--max-lora-rank", "8"], "do not fit --max-lora-rank 8"),
        (["--num-active-loras", "1", "--max-lora-rank", "8"], "--lora-rank 16 do not fit --max-lora-rank 8"),
        (
            ["--output-len", "33", "--max-model-len", "64"],
            "--output-len 33 are 65 tokens a row, more than --max-model-len 64",
        ),
        (["--batch-size", "5", "--max-num-seqs", "4"], "5 rows does not run at once with --max-num-seqs 4"),
        (["--seed", "-1"], "seed must be >= 0, got -1"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_starts(options, message, capsys, monkeypatch):
    monkeypatch.setattr(engine_module, "Engine", lambda *args: pytest.fail("an engine was built"))
    with pytest.raises(ConfigError, match=message):
        latency.run(parse(["latency", "--model", "tiny", "--load-format", "dummy", *options]))
    assert main(["bench", "latency", "--model", "tiny", "--load-format", "dummy", *options]) == 2
    assert message in capsys.readouterr().err


def parse(arguments):
    parser = OptionParser()
    add_subcommands(parser)
    return parser.parse_all(arguments)


def test_engine_options_that_follow_from_the_batch():
    common = ["latency", "--model", "tiny", "--load-format", "dummy"]
    args = rounds.batch_engine_args(parse([*common, "--batch-size", "4", "--input-len", "5", "--output-len", "6"]), 0)
    assert (args.max_model_len, args.max_num_seqs, args.enable_lora) == (11, 4, False)
    args = rounds.batch_engine_args(parse([*common, "--lora-rank", "4", "--max-num-seqs", "9"]), 1)
    assert (args.max_num_seqs, args.enable_lora, args.max_lora_rank) == (9, True, 4)
    limits = (
        "--input-len 32 --output-len 32 --max-model-len 64 --batch-size 4 --max-num-seqs 4 --max-lora-rank 16".split()
    )
    args = rounds.batch_engine_args(parse([*common, *limits]), 4)
    assert (args.max_model_len, args.max_num_seqs, args.max_lora_rank) == (64, 4, 16), "what just fits"
    args = rounds.batch_engine_args(parse([*common, "--enable-lora"]), 0)
    assert (args.enable_lora, args.max_lora_rank) == (True, "auto"), "idle: as an engine would choose"
    assert not rounds.batch_engine_args(parse([*common, "--no-enable-lora"]), 0).enable_lora


def test_latency_takes_one_batch_size():
    assert parse(["latency", "--batch-size", "4", "tiny"]).batch_size == 4
    with pytest.raises(ConfigError):
        latency.model_of(parse(["latency", "--batch-size", "4", "8", "--model", "tiny"]))


def test_the_rank_is_of_active_adapters():
    for more, rank in (
        ([], None),
        (["--num-active-loras", "1"], 16),
        (["--num-active-loras", "1", "--lora-rank", "4"], 4),
    ):
        options = parse(["latency", "m", *more])
        latency.check(options)
        assert options.lora_rank == rank


def test_what_is_said_of_rounds():
    """Three batches of two rows, 10 prompt tokens and 5 tokens out; a Llama-2-7B in bfloat16."""
    options = parse(["latency", "m", "--batch-size", "2", "--input-len", "10", "--output-len", "5"])
    config = known_shape("llama-2-7b")
    plan = SimpleNamespace(num_pages=7)
    stats = {"compilations_after_warmup": 0}
    engine = SimpleNamespace(
        model_config=config, dtype="bfloat16", device=jax.devices()[0], memory_plan=plan, stats=lambda: stats
    )
    times = [rounds.Round(1.0, 0.2), rounds.Round(2.0, 0.4), rounds.Round(6.0, 0.6)]
    result = latency.summarize(times, options, EngineArgs(model="m"), engine)
    assert result["avg_latency"] == 3.0 and result["latencies"] == [1.0, 2.0, 6.0]
    assert result["percentiles"] == {"10": 1.2, "25": 1.5, "50": 2.0, "75": 4.0, "90": 5.2, "99": pytest.approx(5.92)}
    assert result["ttft"] == pytest.approx(0.4)
    step = (0.8 + 1.6 + 5.4) / 3 / 4
    assert result["ms_per_output_token"] == pytest.approx(1e3 * step)
    assert result["output_tokens_per_second"] == pytest.approx(2 * 5 / 3)
    moved = 2 * (6_738_415_616 - 32_000 * 4_096) + 2 * 2 * 2 * 32 * 4096 * 12.5  # contexts 11 to 14
    assert result["bytes_per_step"]["total"] == moved
    assert result["achieved_bytes_per_second"] == pytest.approx(moved / step)
    measured = machine.Bandwidth(4 * moved / step, 1 << 32)
    result["read_bandwidth"] = measured.as_dict(result["achieved_bytes_per_second"])
    assert result["read_bandwidth"]["share"] == pytest.approx(0.25)
    lines = latency.table(result)
    assert lines[:3] == [
        "Avg latency: 3.0 seconds",
        "10% percentile latency: 1.2 seconds",
        "25% percentile latency: 1.5 seconds",
    ]
    assert "That is 25.0% of this machine's read bandwidth" in lines[-1] and "4,096 MiB" in lines[-1]
    result["read_bandwidth"] = machine.Bandwidth(None, 8, "no room").as_dict(1.0)
    assert latency.table(result)[-1] == "This machine's read bandwidth was not measured: no room"


def test_one_token_has_no_decode_step():
    options = parse(["latency", "m", "--output-len", "1"])
    engine = SimpleNamespace(
        model_config=known_shape("tiny"),
        dtype="float32",
        device=jax.devices()[0],
        memory_plan=SimpleNamespace(num_pages=7),
        stats=lambda: {"compilations_after_warmup": 0},
    )
    result = latency.summarize([rounds.Round(1.0, 1.0)], options, EngineArgs(model="m"), engine)
    assert result["ms_per_output_token"] is None and result["achieved_bytes_per_second"] is None
    assert "--output-len is 1" in latency.table(result)[-1]
    latency.chart(result)


def test_whole_run_on_a_tiny_model(tmp_path, capsys):
    out, figure = tmp_path / "result.json", tmp_path / "figure.png"
    arguments = "latency --model tiny --load-format dummy --device cpu --batch-size 2 --input-len 9 --output-len 4"
    arguments += " --num-iters-warmup 1 --num-iters 2 --num-active-loras 2 --lora-rank 4 --max-loras 2 --dtype float32"
    arguments += " --max-num-batched-tokens 18 --disable-tqdm --compilation-cache-dir="
    assert main(["bench", *arguments.split(), "--json", str(out), "--plot", str(figure)]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert json.loads(out.read_text()) == result
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert lines[0] == f"Avg latency: {result['avg_latency']} seconds"
    for line, percent in zip(lines[1:7], (10, 25, 50, 75, 90, 99), strict=True):
        assert line == f"{percent}% percentile latency: {result['percentiles'][str(percent)]} seconds"
    assert len(result["latencies"]) == len(result["ttfts"]) == 2
    assert result["avg_latency"] == pytest.approx(np.mean(result["latencies"]))
    assert 0 < result["ttft"] < result["avg_latency"]
    assert result["ms_per_output_token"] == pytest.approx((result["avg_latency"] - result["ttft"]) / 3 * 1e3)
    config = known_shape("tiny")
    assert result["bytes_per_step"]["adapters"] == 2 * traffic.adapter_bytes(config, 4, 4)
    assert result["bytes_per_step"]["kv"] == 2 * traffic.kv_bytes(config, 4, 11)  # contexts 10, 11, 12
    bandwidth = result["read_bandwidth"]
    assert bandwidth["share"] == pytest.approx(result["achieved_bytes_per_second"] / bandwidth["bytes_per_second"])
    assert result["compilations_after_warmup"] == 0, "measuring the bandwidth compiles, and is not part of serving"
    assert result["hardware"]["platform"] == "cpu" and result["dtype"] == "float32" and result["enable_lora"]
    assert result["command"].startswith("lora-jax bench latency --model tiny ")
