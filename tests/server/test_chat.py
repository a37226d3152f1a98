"""/v1/chat/completions through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from lora_jax.models.generation import GenerationDefaults
from tests.server.conftest import Running
from tests.support.fake_engine import CHOSEN, FakeEngine, answer

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "<user>hello<assistant>"


def chat(server: Running, messages: Any = HELLO, model: str = "base", **more: Any) -> Any:
    return server.openai.chat.completions.create(model=model, messages=messages, **more)


def test_an_answer(server: Running) -> None:
    out = chat(server, model="up2", max_completion_tokens=6, max_tokens=3)
    assert out.choices[0].message.content == answer(PROMPT, 6, 2) and out.choices[0].message.role == "assistant"
    assert (out.model, out.object, out.choices[0].finish_reason) == ("up2", "chat.completion", "length")
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (len(PROMPT), 6)


def test_without_max_tokens_all_the_room_is_used(start: Any) -> None:
    with start(FakeEngine(max_model_len=100)) as server:
        assert chat(server).usage.total_tokens == 100
        server.engine.defaults = GenerationDefaults(max_tokens=9)  # unless the model's authors say less
        assert chat(server).usage.completion_tokens == 9


def test_streaming(server: Running) -> None:
    server.engine.hold = True
    chunks = list(chat(server, max_tokens=7, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer(PROMPT, 7)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1


def test_the_clients_own_stream_helper(server: Running) -> None:
    with server.openai.chat.completions.stream(model="base", messages=HELLO, stop="h") as stream:  # type: ignore[arg-type]
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "<user>"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Running, stream: bool) -> None:
    out = chat(server, max_tokens=3, logprobs=True, top_logprobs=2, stream=stream)
    parts = [c.choices[0].logprobs for c in out] if stream else [out.choices[0].logprobs]
    entries = [e for part in parts if part for e in part.content]
    assert "".join(e.token for e in entries) == PROMPT[:3]
    assert [(e.logprob, e.bytes) for e in entries] == [(CHOSEN, [ord(c)]) for c in PROMPT[:3]]
    assert [[(t.token, t.logprob) for t in e.top_logprobs] for e in entries] == [
        [(c, CHOSEN), (chr(ord(c) + 1), CHOSEN - 1)] for c in PROMPT[:3]
    ]


def test_logprobs_without_top(server: Running) -> None:
    entry = chat(server, max_tokens=1, logprobs=True).choices[0].logprobs.content[0]
    assert (entry.token, entry.top_logprobs) == ("<", [])


def test_text_parts_and_harmless_fields(server: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": parts}, {"role": "assistant", "content": None, "refusal": None}, *HELLO]
    chat(server, messages, max_tokens=1, user="me", metadata={"a": "b"}, store=False, parallel_tool_calls=True)
    assert server.engine.added[0].prompt_token_ids == [ord(c) for c in f"<system>a\nb<assistant>{PROMPT}"]
    neutral = {"tools": [], "tool_choice": "none", "logit_bias": {}, "response_format": {"type": "text"}, "audio": None}
    assert server.post("/v1/chat/completions", messages=HELLO, max_tokens=1, n=1, **neutral).status_code == 200


def test_continue_final_message(server: Running) -> None:
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    chat(server, max_tokens=1, extra_body=extra)
    assert server.engine.added[0].prompt_token_ids == [ord(c) for c in "<user>hello"]
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt"):
        chat(server, extra_body={"continue_final_message": True})


def test_a_model_without_chat_template(server: Running) -> None:
    assert server.engine.tokenizer is not None
    server.engine.tokenizer.has_template = False
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        chat(server)


def test_template_settings(server: Running) -> None:
    chat(server, max_tokens=1, extra_body={"chat_template_kwargs": {"end": "!!"}})
    assert server.engine.added[0].prompt_token_ids == [ord(c) for c in "<user>hello!!<assistant>"]


def test_a_model_without_tokenizer(server: Running) -> None:
    server.engine.tokenizer = None
    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
        chat(server)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", **{"model": "base", "messages": HELLO, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"] or "content" in error["message"]
    assert server.engine.added == []
