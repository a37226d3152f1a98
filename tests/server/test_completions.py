"""/v1/completions through the official client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from lora_jax.models.generation import GenerationDefaults
from tests.server.conftest import Running, wait_for
from tests.support.fake_engine import CHOSEN, FakeEngine, answer


def complete(server: Running, prompt: Any, model: str = "base", **more: Any) -> Any:
    return server.openai.completions.create(model=model, prompt=prompt, **more)


@pytest.mark.parametrize(("model", "shift"), [("base", 0), ("alias", 0), ("up1", 1), ("org/up3", 3)])
def test_the_model_name_chooses_the_adapter(server: Running, model: str, shift: int) -> None:
    out = complete(server, "hello", model, max_tokens=8)
    assert out.choices[0].text == answer("hello", 8, shift)
    assert (out.model, out.object, out.choices[0].finish_reason) == (model, "text_completion", "length")
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.total_tokens) == (5, 8, 13)


def test_without_a_model_the_base_answers(server: Running) -> None:
    out = server.post("/v1/completions", prompt="ab", max_tokens=2).json()
    assert (out["model"], out["choices"][0]["text"]) == ("base", "ab")


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab", "xyz"], [[97, 98], [120, 121, 122]]])
def test_every_form_of_prompt(server: Running, prompt: Any) -> None:
    out = complete(server, prompt, max_tokens=4)
    expected = [answer("ab", 4)] if prompt in ("ab", [97, 98]) else [answer("ab", 4), answer("xyz", 4)]
    assert [(c.index, c.text) for c in out.choices] == list(enumerate(expected))
    assert out.usage.prompt_tokens == (2 if len(expected) == 1 else 5)


def test_defaults_are_openais_sixteen_tokens_and_the_models_sampling(start: Any) -> None:
    engine = FakeEngine()
    engine.defaults = GenerationDefaults(temperature=0.6, top_k=7, max_tokens=99)
    with start(engine) as server:
        assert complete(server, "ab").usage.completion_tokens == 16
        complete(server, "ab", temperature=0.1)
        complete(server, "ab", temperature=None)
    assert [(r.params.temperature, r.params.top_k) for r in engine.added] == [(0.6, 7), (0.1, 7), (0.6, 7)]


def test_sampling_fields_reach_the_engine(server: Running) -> None:
    fields: dict[str, Any] = dict(temperature=0.5, top_p=0.25, seed=-5, stop=["z"], presence_penalty=1.5)
    fields |= dict(frequency_penalty=-2, max_tokens=7)
    extra = dict(top_k=3, min_p=0.125, repetition_penalty=1.25, ignore_eos=True, min_tokens=2, stop_token_ids=[5])
    extra |= dict(skip_special_tokens=False, include_stop_str_in_output=True, prompt_logprobs=2)
    complete(server, "ab", **fields, extra_body=extra)
    params = server.engine.added[0].params
    for name, value in {**fields, **extra, "stop": ("z",), "stop_token_ids": (5,)}.items():
        assert getattr(params, name) == value, name


def test_stop_strings_and_ids(server: Running) -> None:
    out = complete(server, "abcd", stop="c", max_tokens=9).choices[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("ab", "stop", "c")
    out = complete(server, "abcd", max_tokens=9, extra_body={"stop_token_ids": [ord("b")]}).choices[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("a", "stop", ord("b"))


def test_logprobs(server: Running) -> None:
    out = complete(server, "ab", logprobs=2, max_tokens=2).choices[0].logprobs
    assert out.tokens == ["a", "b"] and out.token_logprobs == [CHOSEN, CHOSEN] and out.text_offset == [0, 1]
    assert out.top_logprobs == [{"a": CHOSEN, "b": CHOSEN - 1}, {"b": CHOSEN, "c": CHOSEN - 1}]


def test_echo_with_logprobs_scores_the_prompt(server: Running) -> None:
    out = complete(server, ["abc", "d"], "up1", echo=True, logprobs=1, max_tokens=0)
    first = out.choices[0]
    assert first.text == "abc" and first.finish_reason == "length" and out.usage.completion_tokens == 0
    assert first.logprobs.tokens == ["token_id:97", "b", "c"]  # nothing is known about the first token
    assert first.logprobs.token_logprobs == [None, CHOSEN, CHOSEN] and first.logprobs.top_logprobs[0] is None
    assert out.choices[1].text == "d" and out.choices[1].logprobs.token_logprobs == [None]


def test_echo_shows_the_prompt(server: Running) -> None:
    assert complete(server, "abc", "up1", echo=True, max_tokens=2).choices[0].text == "abcbc"
    assert complete(server, [97, 98], echo=True, max_tokens=1).choices[0].text == "aba"


def test_prompt_logprobs(server: Running) -> None:
    out = server.post("/v1/completions", prompt="ab", max_tokens=1, prompt_logprobs=1).json()
    assert out["choices"][0]["prompt_logprobs"] == [
        None,
        {"98": {"logprob": CHOSEN, "rank": 1, "decoded_token": "b"}},
    ]


@pytest.mark.parametrize("hold", [False, True])
def test_streaming(server: Running, hold: bool) -> None:
    server.engine.hold = hold
    chunks = list(
        complete(server, ["ab", "xyz"], "up1", max_tokens=5, stream=True, stream_options={"include_usage": True})
    )
    for i, prompt in enumerate(["ab", "xyz"]):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == i]
        assert "".join(c.text for c in mine) == answer(prompt, 5, 1)
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 5 + 10
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1


def test_streaming_with_echo_and_logprobs(server: Running) -> None:
    chunks = list(complete(server, "ab", "up1", max_tokens=3, stream=True, echo=True, logprobs=1))
    assert "".join(c.choices[0].text for c in chunks) == "ab" + answer("ab", 3, 1)
    logprobs = [c.choices[0].logprobs for c in chunks]
    assert [t for lp in logprobs for t in lp.tokens][1:] == ["b", "b", "c", "b"]
    offsets = [o for lp in logprobs for o in lp.text_offset]
    assert offsets == sorted(offsets)


def test_continuous_usage(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    server.engine.delay = 0.002
    chunks = list(complete(server, "ab", max_tokens=3, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts) and counts[-2:] == [3, 3]


def test_the_raw_stream_ends_with_done(server: Running) -> None:
    response = server.post("/v1/completions", prompt="ab", max_tokens=2, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]" and all(x.startswith("data: ") for x in lines[:-1])


@pytest.mark.parametrize("text", ["héllo wörld", "日本語のテキスト", "👩‍👩‍👧‍👦🏳️‍🌈", "\u2028\u2029\x85\r\n\x00end"])
def test_unicode_survives(server: Running, text: str) -> None:
    assert complete(server, text, max_tokens=len(text)).choices[0].text == text
    stream = complete(server, text, max_tokens=len(text), stream=True)
    assert "".join(c.choices[0].text for c in stream) == text


def test_many_at_once(server: Running) -> None:
    server.engine.delay = 0.0005
    jobs = [(f"prompt number {i}", 3 + i % 20, ["base", "up1", "up2"][i % 3], i % 3, i % 2 == 0) for i in range(120)]

    def ask(job: tuple[str, int, str, int, bool]) -> str:
        prompt, tokens, model, _, stream = job
        out = complete(server, prompt, model, max_tokens=tokens, stream=stream)
        return "".join(c.choices[0].text for c in out) if stream else out.choices[0].text

    with ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, jobs))
    assert texts == [answer(prompt, tokens, shift) for prompt, tokens, _, shift, _ in jobs]
    wait_for(lambda: server.worker.open_requests == 0)
    assert server.engine.aborts == []


def test_a_request_that_fails_in_the_engine(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="refused this one"):
        complete(server, "!boom", max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="refused this one"):  # before the first chunk: a proper status
        list(complete(server, "!boom", max_tokens=2, stream=True))
    with pytest.raises(openai.BadRequestError):
        complete(server, ["fine" * 9, "!boom"], max_tokens=1000)
    wait_for(lambda: server.engine.aborts)
    assert server.engine.aborts == [server.engine.added[2].request_id]  # the one that was still running
