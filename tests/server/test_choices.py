"""n choices a prompt, through the official client."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.server.conftest import Running, running
from tests.support.fake_engine import FakeEngine, answer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
ASKED = "<user>hi<assistant>"


def test_choices_of_several_prompts_are_numbered_through(server: Running) -> None:
    out = server.openai.completions.create(model="up1", prompt=["ab", "xyz"], n=2, max_tokens=4, echo=True, seed=7)
    texts = ["ab" + answer("ab", 4, 1)] * 2 + ["xyz" + answer("xyz", 4, 1)] * 2
    assert [(c.index, c.text) for c in out.choices] == list(enumerate(texts))
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (5, 16)
    assert [r.params.seed for r in server.engine.added] == [7, 8, 7, 8]


def test_streamed_choices(server: Running) -> None:
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    stream = server.openai.completions.create(
        model="base", prompt="ab", n=3, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(3), answer("ab", 4)) and ends == dict.fromkeys(range(3), "length")
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (2, 12)


def test_chat_choices(server: Running) -> None:
    out = server.openai.chat.completions.create(model="base", messages=MESSAGES, n=2, max_tokens=4)
    assert [(c.index, c.message.content) for c in out.choices] == list(enumerate([answer(ASKED, 4)] * 2))
    assert out.usage and (out.usage.prompt_tokens, out.usage.completion_tokens) == (len(ASKED), 8)


def test_streamed_chat_choices_each_begin_with_the_role(server: Running) -> None:
    roles: list[int] = []
    texts: dict[int, str] = defaultdict(str)
    for chunk in server.openai.chat.completions.create(model="base", messages=MESSAGES, n=2, max_tokens=4, stream=True):
        for choice in chunk.choices:
            if choice.delta.role:
                assert not texts[choice.index]
                roles.append(choice.index)
            texts[choice.index] += choice.delta.content or ""
    assert sorted(roles) == [0, 1] and texts == dict.fromkeys(range(2), answer(ASKED, 4))


def test_prompts_times_choices_count_as_open_requests() -> None:
    with running(FakeEngine(), max_open_requests=5) as server:
        body = dict(prompt=["a", "b"], max_tokens=1)
        assert server.post("/v1/completions", **body, n=2).status_code == 200
        assert server.post("/v1/completions", **body, n=3).status_code == 429
        assert len(server.engine.added) == 4


def test_prompt_tokens_are_counted_once() -> None:
    with running(FakeEngine()) as server:
        server.post("/v1/completions", prompt="abcde", n=4, max_tokens=2)
        text = server.http.get("/metrics").text
    assert 'lora_jax_prompt_tokens_total{model="base"} 5.0' in text
    assert 'lora_jax_generation_tokens_total{model="base"} 8.0' in text
