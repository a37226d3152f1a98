"""Use made to hurt: threads, interrupts, files and parameters of bad intent."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import lora_jax
from lora_jax import LLM, LoRARequest, SamplingParams, compile_cache
from lora_jax.errors import AdapterError, RequestError
from lora_jax.lora import adapter as adapter_module
from lora_jax.lora import patterns
from lora_jax.lora.adapter import read_adapter
from lora_jax.lora.peft_config import parse_config
from lora_jax.models.config import load_config
from lora_jax.models.llama import lora_targets
from lora_jax.request import Logprob, Request
from lora_jax.sampling import init_last_tokens, init_state, sample_full
from lora_jax.sampling_inputs import RowSettings
from lora_jax.server.logprobs import MIN_LOGPROB, prompt_logprobs
from lora_jax.step import _prompt_logprobs
from lora_jax.tokenizer import Tokenizer
from tests.support import tiny, tokenizer_kinds
from tests.test_llm import GREEDY, check_against

BOMB = r"(a|[a-z_.0-9]|.)*[^a-z._0-9]"
MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base("llama", tmp_path_factory.mktemp("base"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return tiny.save_adapter(base, tmp_path_factory.mktemp("adapter"), seed=1)


@pytest.fixture(scope="module")
def oracles(base, adapter) -> dict[str | None, tiny.Oracle]:
    return {None: tiny.Oracle(base), "all": tiny.Oracle(base, adapter)}


@pytest.fixture(scope="module")
def engine_of_module(base) -> LLM:
    small = dict(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, page_size=4, num_pages=13, max_loras=1)
    return LLM(str(base), enable_lora=True, max_lora_rank=4, disable_tqdm=True, **small)


@pytest.fixture
def llm(engine_of_module):
    yield engine_of_module
    engine = engine_of_module.engine
    engine.step()  # takes aborts that were left
    engine.check_integrity()
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["free_pages"] == 12 and not engine._outputs
    for report in engine.list_loras():
        engine.unload_lora(report.name)


def _tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, n).tolist()


PACKAGE = str(Path(lora_jax.__file__).parent) + os.sep


def _prompt(ids: list[int]) -> dict:
    return {"prompt_token_ids": ids}


def test_an_abort_means_the_request_that_has_the_id_now(llm):
    engine = llm.engine
    engine.abort("mine")
    request = engine.make_request(_prompt([5, 6]), SamplingParams(max_tokens=2, **GREEDY), request_id="mine")
    engine.add_request(request)
    reasons = [out.finish_reason for _ in range(3) for out in engine.step()]
    assert reasons == [None, "length"]
    with pytest.raises(RequestError, match="has ended"):
        engine.add_request(request)


def test_many_threads_may_be_the_first_to_name_an_adapter(llm, adapter):
    make = lambda _: llm.engine.make_request(_prompt([5]), SamplingParams(), LoRARequest("all", 1, str(adapter)))  # noqa: E731
    with ThreadPoolExecutor(8) as pool:
        assert len({request.adapter.uid for request in pool.map(make, range(16))}) == 1


def test_threads_take_turns(llm, oracles):
    run = lambda i: llm.generate([_prompt(_tokens(i, 6))] * 3, SamplingParams(max_tokens=4, **GREEDY), use_tqdm=False)  # noqa: E731
    with ThreadPoolExecutor(3) as pool:
        for output in itertools.chain(*pool.map(run, range(6))):
            check_against(oracles[None], output)


def test_an_interrupt_may_come_anywhere(llm, adapter, oracles):
    llm.load_lora("all", str(adapter))
    prompts = [_prompt(_tokens(i, 9)) for i in range(3)]
    params, loras = SamplingParams(max_tokens=3, **GREEDY), [LoRARequest("all"), None, LoRARequest("all")]
    generate = lambda: llm.generate(prompts, params, loras, use_tqdm=False)  # noqa: E731
    lines = 0

    def interrupted(at: float) -> bool:
        """Whether a KeyboardInterrupt at that line of ours came through."""
        nonlocal lines
        lines = 0

        def trace(frame, event, arg):
            nonlocal lines
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            lines += event == "line"
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            generate()
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)

    assert not interrupted(math.inf)
    came = 0
    for at in range(101, lines, max(1, lines // 40)):
        came += interrupted(at)
        for name, output in zip(("all", None, "all"), generate(), strict=True):
            check_against(oracles[name], output)
        llm.engine.check_integrity()
    assert came > 30


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": BOMB},
        {"exclude_modules": BOMB},
        {"rank_pattern": {BOMB: 4}},
        {"alpha_pattern": {BOMB: 4}},
        {"layers_pattern": [BOMB], "layers_to_transform": [0], "target_modules": ["q_proj"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_expression_that_runs_for_ever_is_stopped(fields, monkeypatch):
    monkeypatch.setattr(patterns.Stopwatch.__init__, "__defaults__", (0.3,))
    config = parse_config({"peft_type": "LORA", **fields})
    start = time.monotonic()
    with pytest.raises(AdapterError, match=f"{next(iter(fields))} holds .* takes too long"):
        for _ in range(2):
            config.targets(MODULE, all_linear_holds=True)
            config.ranks(MODULE)
            config.scale(MODULE, 4)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "value",
    [{f"nothing{i}": 4 for i in range(10_000)}, {"x" * (1 << 19): 4}, {"(" * 9 + "x" + "){100}" * 9: 4}],
    ids=["many", "long", "repeated"],
)
def test_an_expression_too_large_to_compile_is_refused(value):
    start = time.monotonic()
    with pytest.raises(AdapterError, match="rank_pattern holds"):
        parse_config({"peft_type": "LORA", "rank_pattern": value})
    assert time.monotonic() - start < 5


def test_a_long_list_of_names_is_looked_up_quickly():
    names = [f"nothing{i}" for i in range(300_000)]
    config = parse_config({"peft_type": "LORA", "target_modules": [*names, "self_attn.q_proj"]})
    start = time.monotonic()
    assert all(config.targets(MODULE, all_linear_holds=True) for _ in range(1000))
    assert not config.targets(f"x{MODULE}"[:-1], all_linear_holds=True)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_change_while_they_are_read_are_refused(file, base, adapter, tmp_path, monkeypatch):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    targets = lora_targets(load_config(base)[0])
    whole = dict(max_rank=8, tied_embeddings=False)
    assert read_adapter(folder, "x", targets, **whole).rank == 4
    parse = parse_config

    def slow(data):
        new = folder / "new"
        shutil.copyfile(folder / file, new)
        new.replace(folder / file)
        return parse(data)

    monkeypatch.setattr(adapter_module, "parse_config", slow)
    with pytest.raises(AdapterError, match="changed while"):
        read_adapter(folder, "x", targets, **whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 10**5000) for name in ("n", "temperature", "top_k", "max_tokens", "seed", "logprobs")),
        ("seed", -(10**5000)),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop_token_ids", 5),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_parameters_of_no_sense_are_request_errors(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})
    with pytest.raises(RequestError, match="lora_path"):
        LoRARequest("x", lora_path=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extreme",
    [
        dict(temperature=1e300),
        dict(temperature=1e39, top_p=1e-300, top_k=10**9),
        dict(temperature=1e-5, repetition_penalty=1e300, min_p=1.0),
        dict(temperature=1.0, repetition_penalty=1e-300),
        dict(temperature=0.0, repetition_penalty=1e-300),
    ],
)
def test_extreme_parameters_never_choose_a_banned_token(extreme):
    vocab, banned = 12, [0, 3, 4, 5, 6]
    params = SamplingParams(**extreme, min_tokens=5, stop_token_ids=banned, seed=-(2**63))
    request = Request("r", [1, 2, 3], params, max_tokens=16, row=0)
    settings, rows = RowSettings(2, vocab, 0), np.array([0, 2], np.int32)
    settings.put(0, request)
    batch = settings.arrays(rows, np.zeros(2, np.int32))
    assert np.isfinite(batch["floats"]).all()
    state = init_state(2, vocab)
    state = state._replace(prompt_seen=state.prompt_seen.at[0, jnp.array([1, 2, 3])].set(True))
    logits = np.array([[9, 0, -1, 8, 0, 0, 7, -30, 3, 0, 1, 2]] * 2, np.float32)
    assert int(sample_full(jnp.asarray(logits), init_last_tokens(2), rows, state, batch)[0][0]) not in (*banned, -1)


def test_no_logprobs_at_all_can_be_configured():
    out = _prompt_logprobs(lambda x: x, jnp.array([1, 2, 0]), 0, jnp.eye(3, 5), block=2)
    assert out.top_ids.shape == (3, 0) and out.logprob.shape == (3,)


def test_logprobs_that_json_cannot_hold():
    entries = {1: Logprob(float("nan")), 2: Logprob(float("-inf"))}
    shown = prompt_logprobs([None, entries])
    assert shown is not None and {e["logprob"] for e in shown[1].values()} == {MIN_LOGPROB}
    json.dumps(shown, allow_nan=False)


def test_a_long_text_does_not_stop_other_threads(tmp_path):
    tokenizer = Tokenizer.load(str(tokenizer_kinds.save("byte_level", tmp_path)))
    text = "hello world " * 60_000
    longest, done = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        while not done.is_set():
            start = time.monotonic()
            time.sleep(0.001)
            longest = max(longest, time.monotonic() - start)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    ids = tokenizer.encode(text)
    took = time.monotonic() - start
    done.set()
    thread.join()
    assert len(ids) > 100_000 and longest < took / 2, (longest, took)


def test_a_user_without_a_home_has_no_cache(monkeypatch, caplog):
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compile_cache.Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    before = compile_cache.jax.config.jax_compilation_cache_dir
    compile_cache.jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert compile_cache.use_compilation_cache(None) is None and "compilation_cache_dir" in caplog.text
    finally:
        compile_cache.jax.config.update("jax_compilation_cache_dir", before)
