"""`LLM` with a tokenizer: what goes in as text and comes out as text, against transformers' own tokenizer and model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_jax import LLM, CompletionOutput, LoRARequest, RequestOutput, SamplingParams
from lora_jax.errors import RequestError
from tests.support import text_model, tiny
from tests.support.text_model import TOLERANCE, TextModel

DEFAULTS = dict(temperature=0.6, top_k=5, top_p=0.9, repetition_penalty=1.3, max_new_tokens=6)
GREEDY = dict(temperature=0.0, ignore_eos=True)
N = 12


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> TextModel:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = text_model.save("llama", folder)
    return TextModel(folder, tokenizer, {None: tiny.Oracle(folder)}, N)


@pytest.fixture(scope="module")
def ended(world) -> tuple[str, int]:
    """A prompt, and the index of the token in its continuation that generation_config.json makes an end."""
    at = 5
    fits = lambda tokens: tokens[at] not in tokens[:at] and world.decode([tokens[at]]).isprintable()  # noqa: E731
    return next(world.prompts(fits)), at


@pytest.fixture(scope="module")
def adapters(world, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: tiny.save_adapter(world.folder, root / name, seed=i) for i, name in enumerate(("a", "b"))}


@pytest.fixture(scope="module")
def llm(world, ended, adapters) -> LLM:
    prompt, at = ended
    tokens, _ = world.greedy(prompt)
    eos = [world.tokenizer.eos_token_id, tokens[at]]
    tiny.edit_json(world.folder / "generation_config.json", eos_token_id=eos, **DEFAULTS)
    small = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=96)
    return LLM(
        str(world.folder),
        device="cpu",
        lora_modules=[f"{name}={path}" for name, path in adapters.items()],
        max_loras=2,
        max_lora_rank=4,
        disable_tqdm=True,
        **small,
    )


@pytest.fixture(autouse=True)
def nothing_is_lost(llm):
    yield
    llm.engine.check_integrity()
    stats = llm.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["free_pages"] == stats["num_pages"] - 1
    assert stats["compilations_after_warmup"] == 0


def one(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(**{**GREEDY, "max_tokens": N, **params}), use_tqdm=False)[0].outputs[0]


# -- text in, text out --


def test_text_is_what_transformers_decodes(llm, world):
    prompts = list(itertools.islice(world.prompts(), 7))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=N, **GREEDY), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, _ = world.greedy(prompt)
        assert output.prompt == prompt and output.prompt_token_ids == world.encode(prompt)
        assert output.prompt_token_ids[0] == world.tokenizer.bos_token_id
        assert output.outputs[0].token_ids == tokens
        assert output.outputs[0].text == world.decode(tokens)
    assert len({o.outputs[0].text for o in outputs}) == 7


def test_a_text_and_its_ids_give_the_same(llm, world):
    text = next(world.prompts())
    by_text, by_ids = llm.generate(
        [text, {"prompt_token_ids": world.encode(text)}], SamplingParams(max_tokens=N, **GREEDY), use_tqdm=False
    )
    assert by_text.outputs == by_ids.outputs and by_text.prompt_token_ids == by_ids.prompt_token_ids
    assert (by_text.prompt, by_ids.prompt) == (text, None)


def test_special_tokens_are_left_out_unless_wanted(llm, world):
    special = set(world.tokenizer.all_special_ids)
    prompt = next(world.prompts(lambda tokens: special & set(tokens[:-1])))
    tokens, _ = world.greedy(prompt)
    hidden, shown = one(llm, prompt), one(llm, prompt, skip_special_tokens=False)
    assert hidden.token_ids == shown.token_ids == tokens
    assert hidden.text == world.decode(tokens) and shown.text == world.decode(tokens, skip=False)
    assert "s>" in shown.text and "s>" not in hidden.text


def test_without_detokenize_there_is_no_text(llm, world):
    prompt = next(world.prompts())
    out = one(llm, prompt, detokenize=False)
    assert out.token_ids == world.greedy(prompt)[0] and out.text == ""


# -- what ends a text --


def across(world: TextModel, tokens: list[int]) -> tuple[str, int] | None:
    """(a string of two characters that two tokens share, index of the second one), first met there."""
    texts = [world.decode([t]) for t in tokens]
    for i in range(2, len(tokens) - 2):
        stop = texts[i][-1:] + texts[i + 1][:1]
        if (
            len(stop) == 2
            and stop.isascii()
            and world.decode(tokens).find(stop) == len(world.decode(tokens[: i + 1])) - 1
        ):
            return stop, i + 1
    return None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_two_tokens(llm, world, include):
    prompt = next(world.prompts(lambda tokens: across(world, tokens)))
    tokens, _ = world.greedy(prompt)
    stop, last = across(world, tokens) or pytest.fail()
    text = world.decode(tokens)
    for stops in (stop, [stop], ["never in it", stop]):
        out = one(llm, prompt, stop=stops, include_stop_str_in_output=include)
        assert out.token_ids == tokens[: last + 1]
        assert out.text == text[: text.index(stop) + (len(stop) if include else 0)]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    out = one(llm, prompt, stop=["never in it", stop + "\0"])  # its beginning is held back, and comes in the end
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == (text, tokens, "length", None)


def test_a_stop_string_inside_one_token(llm, world):
    long = lambda tokens: [t for t in tokens[2:-1] if world.decode([t]).isalpha() and len(world.decode([t])) > 1]  # noqa: E731
    prompt = next(world.prompts(long))
    tokens, _ = world.greedy(prompt)
    text, stop = world.decode(tokens), world.decode([long(tokens)[0]])[1:]
    out = one(llm, prompt, stop=stop)
    assert out.text == text[: text.index(stop)] and stop in world.decode(out.token_ids)
    assert stop not in world.decode(out.token_ids[:-1]), "it went on after the stop string"


@pytest.mark.parametrize("include", [False, True])
def test_any_end_token_of_generation_config(llm, world, ended, include):
    prompt, at = ended
    tokens, _ = world.greedy(prompt)
    out = one(llm, prompt, ignore_eos=False, include_stop_str_in_output=include)
    assert out.token_ids == tokens[: at + 1]
    assert out.text == world.decode(tokens[: at + include])
    assert (out.finish_reason, out.stop_reason) == ("stop", None)


def test_ignore_eos(llm, world, ended):
    prompt, _ = ended
    out = one(llm, prompt, ignore_eos=True)
    assert (out.token_ids, out.finish_reason) == (world.greedy(prompt)[0], "length")


def test_min_tokens_holds_back_end_tokens(llm, world, ended):
    prompt, at = ended
    tokens, _ = world.greedy(prompt)
    eos = {world.tokenizer.eos_token_id, tokens[at]}
    assert one(llm, prompt, ignore_eos=False, min_tokens=at).token_ids == tokens[: at + 1]
    want = world.encode(prompt)
    start = len(want)
    while len(want) < start + N:  # greedy, the end tokens banned from the first at + 3 tokens
        logits = world.oracle.logits(want)[-1]
        if len(want) < start + at + 3:
            logits[list(eos)] = -np.inf
        want.append(int(logits.argmax()))
        if want[-1] in eos:
            break
    got = one(llm, prompt, ignore_eos=False, min_tokens=at + 3).token_ids
    assert got == want[start:] and len(got) > at + 3 and not eos & set(got[: at + 3])


def test_min_tokens_holds_back_stop_strings(llm, world):
    prompt = next(world.prompts(lambda tokens: across(world, tokens)))
    tokens, _ = world.greedy(prompt)
    stop, last = across(world, tokens) or pytest.fail()
    assert one(llm, prompt, stop=stop, min_tokens=last).token_ids == tokens[: last + 1]
    out = one(llm, prompt, stop=stop, min_tokens=last + 3)
    assert len(out.token_ids) >= last + 3 and stop in out.text


# -- defaults --


def test_defaults_of_generation_config(llm, world):
    params = llm.get_default_sampling_params()
    want = {**DEFAULTS, "max_tokens": DEFAULTS["max_new_tokens"]}
    del want["max_new_tokens"]
    assert params == SamplingParams(**want)
    assert SamplingParams() != params, "a SamplingParams that the caller makes is not changed by the file"


def test_without_sampling_params_the_defaults_count(llm, world):
    """Each token is among the five best after the repetition penalty, and six tokens are the most."""
    prompts = list(itertools.islice(world.prompts(), 4))
    for params in (None, [None] * 4):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        lengths = [len(o.outputs[0].token_ids) for o in outputs]
        assert max(lengths) == 6, lengths
        for output in outputs:
            ids = list(output.prompt_token_ids)
            for token in output.outputs[0].token_ids:
                logits = world.oracle.logits(ids)[-1]
                seen = list(set(ids))
                logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
                assert logits[token] > np.sort(logits)[-5] - TOLERANCE
                ids.append(token)


# -- one for all, or one each --


def test_params_and_adapters_one_each(llm, world, adapters):
    prompt = next(world.prompts())
    oracles = {None: world.oracle, **{name: tiny.Oracle(world.folder, path) for name, path in adapters.items()}}
    names, lengths = ["a", None, "b", "a", None], [3, 8, 5, 8, 1]
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in lengths]
    loras = [name and LoRARequest(name) for name in names]
    outputs = llm.generate([prompt] * 5, params, loras, use_tqdm=False)
    for name, n, lora, output in zip(names, lengths, loras, outputs, strict=True):
        tokens, margin = oracles[name].greedy(world.encode(prompt), n)
        assert margin > TOLERANCE, f"{name}: choose another prompt"
        assert output.outputs[0].token_ids == tokens and output.outputs[0].text == world.decode(tokens)
        assert output.lora_request is lora
    for_all = llm.generate([prompt] * 2, params[1], LoRARequest("b"), use_tqdm=False)
    assert [o.outputs[0].token_ids[:5] for o in for_all] == [outputs[2].outputs[0].token_ids] * 2


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        (lambda llm: llm.generate(["x"] * 3, SamplingParams(), [None] * 2), "lora_request", "2 entries for 3"),
        (lambda llm: llm.generate(["x"], SamplingParams(), ["a"]), "lora_request", "LoRARequest, got str"),
        (lambda llm: llm.generate(["x"], [{"top_p": 1}]), "sampling_params", "SamplingParams, got dict"),
        (lambda llm: llm.generate(["x"], SamplingParams(n=129)), "n", "n must be an integer in"),
        (lambda llm: llm.generate("half of a pair: \ud800"), "prompt", "Unicode"),
        (lambda llm: llm.generate(["x", 5]), "prompt", "got int"),
    ],
)
def test_what_cannot_be_meant_is_refused(llm, call, param, message):
    before = llm.stats()["steps"]
    with pytest.raises(RequestError, match=message) as e:
        call(llm)
    assert e.value.param == param and llm.stats()["steps"] == before


def test_outputs_are_in_the_order_of_the_prompts(llm, world):
    """Whatever ends first, and with the same prompt several times."""
    some = list(itertools.islice(world.prompts(), 3))
    prompts = [some[0], some[1], some[0], some[2], some[0], some[1]]
    lengths = [N, 1, N, 2, 3, N]
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts and len({o.request_id for o in outputs}) == 6
    assert [o.outputs[0].token_ids for o in outputs] == [
        world.greedy(p)[0][:n] for p, n in zip(prompts, lengths, strict=True)
    ]
    assert llm.generate([], use_tqdm=False) == []


# -- fields --


def test_outputs_have_the_fields_that_vllms_have(llm, world):
    prompt, lora = next(world.prompts()), LoRARequest("a", 7)
    output = llm.generate(prompt, SamplingParams(max_tokens=3, **GREEDY), lora, use_tqdm=False)[0]
    assert isinstance(output, RequestOutput) and isinstance(output.request_id, str)
    assert (output.prompt, output.prompt_token_ids) == (prompt, world.encode(prompt))
    assert output.prompt_logprobs is None and output.finished is True and output.lora_request is lora
    assert len(output.outputs) == 1
    completion = output.outputs[0]
    assert completion.index == 0 and isinstance(completion.text, str) and len(completion.token_ids) == 3
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_logprobs_name_their_tokens(llm, world):
    prompt = next(world.prompts())
    ids, (tokens, _) = world.encode(prompt), world.greedy(prompt)
    params = SamplingParams(max_tokens=N, logprobs=3, prompt_logprobs=2, **GREEDY)
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    want, completion = world.oracle.logprobs(ids + tokens), output.outputs[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    rows = [*output.prompt_logprobs[1:], *(completion.logprobs or [])]
    assert len(rows) == len(ids) - 1 + N
    for i, (row, chosen) in enumerate(zip(rows, (ids + tokens)[1:], strict=True)):
        assert next(iter(row)) == chosen, "the token itself comes first"
        assert len(row) in ((2, 3) if i < len(ids) - 1 else (3,))
        for token, entry in row.items():
            assert entry.decoded_token == world.decode([token], skip=False)
            assert entry.logprob == pytest.approx(want[i, token], abs=TOLERANCE)
            assert entry.rank == 1 + (want[i] > want[i, token]).sum()
    total = sum(row[token].logprob for row, token in zip(completion.logprobs or [], tokens, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)


# -- chat --

TALK = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "?"},
]


@pytest.mark.parametrize("add", [True, False])
def test_chat_uses_the_models_template(llm, world, add):
    params = SamplingParams(max_tokens=4, **GREEDY)
    prompts = [world.chat_ids(TALK, add), world.chat_ids(TALK[:1], add)]
    assert world.decode(prompts[1], skip=False) == "<s>[user]the cat</s>" + "[assistant]" * add
    one_talk = llm.chat(TALK, params, use_tqdm=False, add_generation_prompt=add)
    several = llm.chat([TALK, TALK[:1]], params, [None, LoRARequest("a")], use_tqdm=False, add_generation_prompt=add)
    assert len(one_talk) == 1 and len(several) == 2
    loras = [None, None, LoRARequest("a")]
    for ids, output, lora in zip([prompts[0], *prompts], [*one_talk, *several], loras, strict=True):
        assert output.prompt_token_ids == ids, "special tokens come from the template alone"
        same = llm.generate({"prompt_token_ids": ids}, params, lora, use_tqdm=False)[0]
        assert same.outputs == output.outputs


def test_chat_that_cannot_be(llm, monkeypatch):
    with pytest.raises(RequestError, match="no tools here"):  # said by the template
        llm.chat([{"role": "tool", "content": "x"}])
    monkeypatch.setattr(llm.engine.tokenizer.hf, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template") as e:
        llm.chat(TALK)
    assert e.value.param == "messages"
    monkeypatch.setattr(llm.engine, "tokenizer", None)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.chat(TALK)
    with pytest.raises(RequestError, match="no tokenizer: send prompt_token_ids"):
        llm.generate("text")


# -- interrupts --


@pytest.mark.parametrize("lost", [False, True], ids=["between calls", "pages given up"])
@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupt_leaves_nothing_behind(llm, world, monkeypatch, after, lost):
    prompts = list(itertools.islice(world.prompts(), 4))
    runtime, dispatch, calls = llm.engine._runtime, llm.engine._runtime.dispatch, itertools.count(1)

    def interrupted(plan):
        if next(calls) <= after:
            return dispatch(plan)
        if lost:  # as an interrupt inside the executable's call leaves them: donated, and the new ones not yet taken
            for page in runtime._kv:
                page.delete()
        raise KeyboardInterrupt

    params = SamplingParams(max_tokens=N, **GREEDY)
    loras = [None, LoRARequest("a"), None, LoRARequest("b")]
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, loras, use_tqdm=False)
    before = llm.stats()["generation_tokens"]
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [world.greedy(p)[0] for p in prompts]
    assert llm.stats()["generation_tokens"] - before == 2 * 4 * N, "requests of the interrupted call went on"
