"""n continuations of one prompt: offline, in the engine against requests of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.errors import RequestError
from lora_jax.request import MAX_N, Request, continuations
from tests.support import tiny

PROMPT: Any = {"prompt_token_ids": list(range(3, 30))}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    base: Path = tiny.save_base("llama", tmp_path_factory.mktemp("base"))
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, max_loras=1, page_size=4)
    llm = LLM(str(base), enable_lora=True, max_lora_rank=8, disable_tqdm=True, **sizes)
    llm.load_lora("a", str(tiny.save_adapter(base, tmp_path_factory.mktemp("adapter") / "a", seed=1)))
    return llm


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "temperature": 1.0, **more})


@pytest.mark.parametrize("lora", [None, LoRARequest("a")])
def test_each_draws_as_a_request_with_its_seed(llm, lora):
    (output,) = llm.generate([PROMPT], params(n=3, seed=41, logprobs=1), lora)
    assert [c.index for c in output.outputs] == [0, 1, 2] and output.finished
    alone = [llm.generate([PROMPT], params(seed=41 + i), lora)[0].outputs[0].token_ids for i in range(3)]
    assert [c.token_ids for c in output.outputs] == alone and len(set(map(tuple, alone))) == 3
    for c in output.outputs:
        assert c.finish_reason == "length" and c.logprobs is not None and len(c.logprobs) == 8
        total = sum(entry[token].logprob for entry, token in zip(c.logprobs, c.token_ids, strict=True))
        assert c.cumulative_logprob == pytest.approx(total)


def test_without_a_seed_they_differ(llm):
    (output,) = llm.generate([PROMPT], params(n=4))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4


def test_the_prompt_is_computed_once(llm):
    prompt: Any = {"prompt_token_ids": list(range(60, 89))}
    before = llm.stats()
    llm.generate([prompt], params(n=4))
    after = llm.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 29 + 3 * (29 - 28)
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == 3 * 28


def test_several_prompts_with_numbers_of_their_own(llm):
    outputs = llm.generate([PROMPT, PROMPT, PROMPT], [params(n=2), params(), params(n=3, max_tokens=3)])
    assert [len(o.outputs) for o in outputs] == [2, 1, 3]
    assert [[len(c.token_ids) for c in o.outputs] for o in outputs] == [[8, 8], [8], [3, 3, 3]]
    assert len({o.request_id for o in outputs}) == 3 and not any("_" in o.request_id for o in outputs)


def test_logprobs_of_the_prompt_come_with_all(llm):
    (output,) = llm.generate([PROMPT], params(n=2, prompt_logprobs=1))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 27
    assert output.prompt_logprobs[0] is None and all(output.prompt_logprobs[1:])


@pytest.mark.parametrize("n", [0, -1, MAX_N + 1, 10**9, 1.5, "2", True, None])
def test_wrong_numbers_are_refused(n):
    with pytest.raises(RequestError, match="n must be"):
        SamplingParams(n=n)


def test_seeds_stay_within_64_bits():
    last = 2**63 - 1
    made = continuations(Request("r", [1], SamplingParams(n=3, seed=last)))
    seeds = [r.params.seed for r in made]
    assert seeds == [last, -(2**63), 1 - 2**63]
    assert [seed & (2**64 - 1) for seed in seeds if seed is not None] == [last, last + 1, last + 2]
    assert [r.request_id for r in made] == ["0_r", "1_r", "2_r"] and all(r.params.n == 1 for r in made)


def test_every_field_of_the_request_is_carried_over():
    made = Request("r", [1, 2], SamplingParams(n=2), adapter="x", prompt="p", lora_request=LoRARequest("x"))
    made.eos_token_ids, made.max_tokens = frozenset({2}), 7
    for each in continuations(made):
        for field in dataclasses.fields(Request):
            if field.name not in ("request_id", "params", "index"):
                assert getattr(each, field.name) == getattr(made, field.name), field.name
        assert each.token_ids is not made.token_ids and each.pages is not made.pages


def test_the_engine_takes_them_one_by_one(llm):
    request = llm.engine.make_request(PROMPT, params(n=2))
    with pytest.raises(RequestError, match="n > 1"):
        llm.engine.add_request(request)
    assert not llm.engine.has_unfinished()
