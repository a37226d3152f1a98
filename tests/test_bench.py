"""The benchmark's arithmetic against hand-made engines and known models, and one whole run on a tiny model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from lora_jax.bench import adapters, latency, traffic
from lora_jax.bench.cli import add_subcommands
from lora_jax.cli import main
from lora_jax.cli_args import OptionParser
from lora_jax.errors import ConfigError, EngineDeadError
from lora_jax.models.shapes import known_shape
from lora_jax.request import SamplingParams, StepOutput


class FakeEngine:
    """Gives each request one token a step, the last added one from its second step on. Each step takes a second."""

    def __init__(self, error: Exception | None = None):
        self.now, self.open, self.seen, self.started, self.error = 0.0, {}, [], False, error

    def make_request(self, prompt, params, lora_request):
        self.now += 100.0  # tokenizing and checking is not part of the batch
        return SimpleNamespace(request_id=str(int(self.now / 100)), prompt=prompt, params=params, lora=lora_request)

    def add_request(self, request):
        self.seen.append(request)
        self.open[request.request_id] = request.params.max_tokens

    def has_unfinished(self):
        return bool(self.open)

    def step(self):
        self.now += 1.0
        if self.error is not None:
            return [StepOutput("0", error=self.error)]
        late = None if self.started else self.seen[-1].request_id
        self.started = True
        out = []
        for name in set(self.open) - {late}:
            self.open[name] -= 1
            out.append(StepOutput(name, token_ids=[7]))
            if not self.open[name]:
                del self.open[name]
        return out


def test_a_round_is_timed_from_hand_over_to_last_token():
    engine = FakeEngine()
    engine.make_request([0], SamplingParams(max_tokens=5), None)
    names = [None, "a", None]
    done = latency.run_batch(engine, [[1], [2], [3]], SamplingParams(max_tokens=5), names, clock=lambda: engine.now)
    assert done == latency.Round(latency=6.0, ttft=2.0)
    assert [r.lora for r in engine.seen] == names
    assert [r.prompt for r in engine.seen] == [{"prompt_token_ids": [i]} for i in (1, 2, 3)]


def test_a_failed_request_stops_the_benchmark():
    with pytest.raises(EngineDeadError, match="gone"):
        latency.run_batch(FakeEngine(EngineDeadError("gone")), [[1]], SamplingParams(), [None])


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


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch-size", "2", "--num-active-loras", "3"], "needs a row"),
        (["--num-active-loras", "3", "--max-loras", "2"], "--max-loras"),
    ],
)
def test_impossible_adapter_counts_are_refused(options, message, capsys):
    with pytest.raises(ConfigError, match=message):
        latency.engine_arguments(parse(["latency", "--model", "tiny", "--load-format", "dummy", *options]))
    assert main(["bench", "latency", "--model", "tiny", "--load-format", "dummy", *options]) == 2
    assert message in capsys.readouterr().err


def parse(arguments):
    parser = OptionParser()
    add_subcommands(parser)
    return parser.parse_all(arguments)


def test_engine_options_that_follow_from_the_batch():
    common = ["latency", "--model", "tiny", "--load-format", "dummy"]
    args = latency.engine_arguments(parse([*common, "--batch-size", "4", "--input-len", "5", "--output-len", "6"]))
    assert (args.max_model_len, args.max_num_seqs, args.enable_lora) == (11, 4, False)
    args = latency.engine_arguments(
        parse([*common, "--num-active-loras", "1", "--lora-rank", "4", "--max-num-seqs", "9"])
    )
    assert (args.max_num_seqs, args.enable_lora, args.max_lora_rank) == (9, True, 4)


def test_whole_run_on_a_tiny_model(tmp_path, capsys):
    out = tmp_path / "result.json"
    arguments = "latency --model tiny --load-format dummy --device cpu --batch-size 2 --input-len 9 --output-len 4"
    arguments += " --num-iters-warmup 1 --num-iters 2 --num-active-loras 2 --lora-rank 4 --max-loras 2"
    arguments += " --dtype float32 --max-num-batched-tokens 18"
    assert main(["bench", *arguments.split(), "--disable-tqdm", "--compilation-cache-dir", "", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert json.loads(out.read_text()) == result
    assert any(line.startswith("Avg latency: ") and line.endswith(" seconds") for line in lines)
    assert sum("% percentile latency: " in line for line in lines) == 6
    assert len(result["latencies"]) == 2
    assert result["avg_latency"] == pytest.approx(np.mean(result["latencies"]))
    assert 0 < result["ttft"] < result["avg_latency"]
    assert result["ms_per_output_token"] == pytest.approx((result["avg_latency"] - result["ttft"]) / 3 * 1e3)
    config = known_shape("tiny")
    assert result["bytes_per_step"]["adapters"] == 2 * traffic.adapter_bytes(config, 4, 4)
    assert result["bytes_per_step"]["kv"] == 2 * traffic.kv_bytes(config, 4, 11)  # contexts 10, 11, 12
    assert result["compilations_after_warmup"] == 0
    assert result["platform"] == "cpu" and result["dtype"] == "float32"
