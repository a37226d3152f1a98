"""A small engine with few pages and slots, its oracles, and helpers: for tests of the lookahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.request import Request, StepOutput
from tests.support import tiny

GREEDY = dict(temperature=0.0, ignore_eos=True)


def tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, n).tolist()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base("llama", tmp_path_factory.mktemp("base"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> dict[str, Path]:
    return {name: tiny.save_adapter(base, tmp_path_factory.mktemp(name), seed=ord(name)) for name in "abc"}


@pytest.fixture(scope="module")
def oracles(base, adapters) -> dict[str | None, tiny.Oracle]:
    return {None: tiny.Oracle(base), **{name: tiny.Oracle(base, path) for name, path in adapters.items()}}


@pytest.fixture(scope="module")
def engine_of_module(base) -> LLM:
    """Few pages and slots: requests are preempted, adapters change places."""
    small = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48, page_size=4, num_pages=15, max_loras=2)
    return LLM(str(base), enable_lora=True, max_lora_rank=4, disable_tqdm=True, **small)


@pytest.fixture
def llm(engine_of_module, adapters):
    engine = engine_of_module.engine
    for name, path in adapters.items():
        engine.load_lora(name, str(path))
    yield engine_of_module
    engine.step()
    engine.check_integrity()
    assert engine._in_flight is None and not engine._outputs
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["compilations_after_warmup"] == 0, stats
    assert stats["free_pages"] == 14
    for report in engine.list_loras():
        engine.unload_lora(report.name)


def add(llm: LLM, ids: list[int], lora: str | None = None, id: str | None = None, **params: Any) -> Request:
    params = {**GREEDY, "max_tokens": 8, **params}
    prompt: Any = {"prompt_token_ids": ids}
    request = llm.engine.make_request(prompt, SamplingParams(**params), lora and LoRARequest(lora), id)
    llm.engine.add_request(request)
    return request


def drain(llm: LLM, after: Callable[[], None] = lambda: None) -> dict[str, list[StepOutput]]:
    """Outputs of each request, until all have ended."""
    outputs: dict[str, list[StepOutput]] = {}
    while llm.engine.has_unfinished():
        for out in llm.engine.step():
            outputs.setdefault(out.request_id, []).append(out)
        llm.engine.check_integrity()
        after()
    return outputs


def given(outputs: dict[str, list[StepOutput]], request: Request) -> list[int]:
    return [t for out in outputs[request.request_id] for t in out.token_ids]


def expected(oracle: tiny.Oracle, request: Request) -> list[int]:
    """What transformers chooses, up to the request's stop token."""
    want, margin = oracle.greedy(request.prompt_token_ids, request.max_tokens)
    assert margin > 1e-4
    stops = [i for i, t in enumerate(want) if t in (request.params.stop_token_ids or ())]
    return want[: stops[0] + 1] if stops else want
