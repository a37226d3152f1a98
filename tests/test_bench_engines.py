"""What the comparison of engines stands on: base weights that several engines share, and LoRA steps without specialization."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lora_jax import LoRARequest, SamplingParams
from lora_jax import builder as builder_module
from lora_jax.bench.adapters import write_random_adapter
from lora_jax.bench.cli import add_subcommands
from lora_jax.cli_args import OptionParser, engine_args_from
from lora_jax.config import CacheConfig, EngineArgs, SchedulerConfig
from lora_jax.engine import Engine
from lora_jax.errors import ConfigError
from lora_jax.models.config import parse_config
from lora_jax.models.shapes import SHAPES
from lora_jax.request import Request
from lora_jax.scheduler import Scheduler
from lora_jax.step_keys import step_keys

OPTIONS = dict(
    load_format="dummy",
    max_model_len=32,
    max_num_seqs=2,
    max_num_batched_tokens=32,
    num_pages=9,
    max_loras=2,
    disable_tqdm=True,
    compilation_cache_dir="",
    device="cpu",
)
LORA = dict(enable_lora=True, max_lora_rank=4)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]


def engine(weights: Engine | None = None, **options) -> Engine:
    return Engine(EngineArgs(**{"model": "tiny", **OPTIONS, **options}), weights=weights)  # type: ignore[arg-type]


def tokens(engine: Engine, *adapters: LoRARequest | None, n: int = 8) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
    pairs = zip(PROMPTS, adapters or (None, None), strict=True)
    requests = [engine.make_request({"prompt_token_ids": p}, params, a) for p, a in pairs]
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
    return [request.token_ids[len(request.prompt_token_ids) :] for request in requests]


def ran(engine: Engine) -> set[str]:
    hits = {row["key"]: row["hits"] for row in engine.step_table.report()}
    return {key for key, n in hits.items() if n and key.startswith(("decode", "prefill"))}


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def adapter(plain: Engine, tmp_path_factory) -> str:
    folder = write_random_adapter(tmp_path_factory.mktemp("adapter") / "a", plain.model_config, 4, 1)
    settings = folder / "adapter_config.json"
    strong = {"lora_alpha": 10_000}  # enough to change tokens
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **strong}))
    return str(folder)


@pytest.fixture(scope="module")
def own() -> Engine:
    """LoRA, weights of its own."""
    return engine(**LORA)


@pytest.fixture(scope="module")
def shared(plain: Engine) -> Engine:
    """LoRA steps alone, on plain's weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_module, "_load", lambda *args: pytest.fail("weights were loaded"))
        return engine(plain, **LORA, specialize_lora=False)


def test_shared_weights_are_the_same_buffers(plain, own, shared):
    address = lambda e: [x.unsafe_buffer_pointer() for x in e._built.params]  # noqa: E731
    assert address(shared) == address(plain) and not set(address(own)) & set(address(plain))
    assert plain.memory_plan.sizes.weights > 0 and shared.memory_plan.sizes.weights == 0
    assert shared.memory_plan.items()["weights"] == 0, "the plan counts what is taken anew"


def test_shared_weights_give_what_own_weights_give(plain, own, shared, adapter):
    assert tokens(plain) == tokens(own) == tokens(shared)
    for e in (own, shared):
        e.load_lora("a", adapter)
    request = LoRARequest("a")
    expected = tokens(own, None, request)
    assert tokens(shared, None, request) == expected
    assert expected[0] == tokens(plain)[0] and expected[1] != tokens(plain)[1], "the adapter must matter"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(model="smollm2-135m"), "model=smollm2-135m is not that of the engine to share them with, tiny"),
        (dict(dtype="bfloat16"), "dtype=bfloat16 is not that of the engine to share them with, float32"),
        (dict(seed=1), "seed=1"),
    ],
)
def test_weights_that_are_not_the_same_are_refused(plain, options, words):
    with pytest.raises(ConfigError, match=words):
        engine(plain, **options)


def test_a_model_that_has_changed_on_disk_is_refused(plain, monkeypatch):
    changed = parse_config({**SHAPES["tiny"], "rope_theta": 12345.0}, "changed")
    monkeypatch.setattr(builder_module, "known_shape", lambda name: changed)
    with pytest.raises(ConfigError, match="configuration of tiny has changed"):
        engine(plain)


def test_another_device_is_refused(plain):
    setup = SimpleNamespace(device="cuda:0")
    with pytest.raises(ConfigError, match="device=cuda:0 is not that"):
        builder_module._check_shared(plain.args, plain.model_config, plain.dtype, setup, plain._built)


def test_idle_steps_are_lora_steps_where_they_are_not_specialized(own, shared):
    assert tokens(own) == tokens(shared)
    assert ran(shared) and all(key.endswith("+lora") for key in ran(shared))
    model_steps = [row["key"] for row in shared.step_table.report() if row["key"].startswith(("decode", "prefill"))]
    assert model_steps and all(key.endswith("+lora") for key in model_steps), "no plain step is compiled"
    assert any(not key.endswith("+lora") for key in ran(own))


def test_prompt_logprobs_without_specialization(plain, shared):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    found = []
    for e in (plain, shared):
        e.add_request(e.make_request({"prompt_token_ids": PROMPTS[0]}, params, None))
        outputs = []
        while e.has_unfinished():
            outputs += e.step()
        (entries,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
        found.append([{token: entry.logprob for token, entry in (at or {}).items()} for at in entries])
    assert len(found[0]) == len(PROMPTS[0]) and all(found[0][1:])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_the_list_of_keys():
    specialized = set(step_keys(SchedulerConfig(4, 64, 64), enable_lora=True))
    alone = set(step_keys(SchedulerConfig(4, 64, 64, specialize_lora=False), enable_lora=True))
    model = ("decode", "prefill", "prompt_logprobs")
    assert alone < specialized
    assert specialized - alone == {key for key in specialized if key.phase in model and not key.lora}


@pytest.mark.parametrize("specialize", [True, False])
def test_the_scheduler_names_the_step(specialize):
    scheduler = Scheduler(SchedulerConfig(2, 32, 32, specialize), CacheConfig(16, 9))
    scheduler.add(Request("r", [1, 2, 3], SamplingParams(max_tokens=2), max_tokens=2))
    plan = scheduler.plan()
    assert plan is not None and plan.key.lora is not specialize


def test_the_option(capsys):
    with pytest.raises(ConfigError, match="specialize_lora=False needs enable_lora"):
        EngineArgs("m", specialize_lora=False)
    assert not EngineArgs("m", specialize_lora=False, lora_modules=("a=b",)).specialize_lora
    parser = OptionParser()
    add_subcommands(parser)
    parsed = lambda *flags: engine_args_from(parser.parse_all(["latency", "m", "--enable-lora", *flags]))  # noqa: E731
    assert not parsed("--no-specialize-lora").specialize_lora and parsed().specialize_lora
    with pytest.raises(SystemExit):
        parser.parse_all(["latency", "--help"])
    assert "cudagraph_specialize_lora" in capsys.readouterr().out
