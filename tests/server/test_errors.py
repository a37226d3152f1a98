"""Every error comes in OpenAI's form, with a fitting status, and leaves the server as it was."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from lora_jax.server import http
from tests.server.conftest import Running
from tests.support.fake_engine import FakeEngine


def check(response: Any, status: int, *words: str, param: str | None = None) -> None:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


def test_an_unknown_model_lists_the_names(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.completions.create(model="nope", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    for name in ("nope", "base", "alias", "up1", "up2", "org/up3"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"model": 5}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2**40}, "top_k"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"n": 129}, "n"),
        ({"n": 10**9}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"guided_regex": "a*"}, "guided_regex"),
        ({"tools": [1]}, "tools"),
        ({"lora_request": {"name": "x"}}, "lora_request"),
    ],
)
def test_a_wrong_field_is_named(server: Running, body: dict[str, Any], param: str) -> None:
    full = {"prompt": "x", **body} if body else {}
    check(server.post("/v1/completions", **full), 400, param if param not in ("n",) else "n", param=param)
    assert server.engine.added == []


def test_a_misspelt_field_gets_a_hint(server: Running) -> None:
    response = server.post("/v1/completions", prompt="x", max_token=5)
    check(response, 400, "max_token is not a field", "did you mean 'max_tokens'", param="max_token")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b"prompt=x",
    ],
)
def test_what_is_no_json_object(server: Running, content: bytes) -> None:
    check(server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"}), 400)
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"]
)
def test_other_content_types(server: Running, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    check(server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers), 415, "application/json")


def test_content_type_with_a_charset(server: Running) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert server.http.post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(server: Running, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 2 << 20)
    content = (b'{"prompt": "' + b"x" * (1 << 20) for _ in range(4)) if chunked else b"x" * (4 << 20)
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    check(response, 413, "larger than 2 MiB")


def test_too_long_prompts_name_the_lengths(start: Any) -> None:
    with start(FakeEngine(max_model_len=50)) as server:
        check(server.post("/v1/completions", prompt="x" * 50), 400, "50", "max_model_len", param="prompt")
        response = server.post("/v1/completions", prompt="x" * 40, max_tokens=11)
        check(response, 400, "40", "11", "51", "50", param="max_tokens")
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert server.post("/v1/completions", prompt="x" * 40, max_tokens=10).status_code == 200
        out = server.post("/v1/completions", prompt="x" * 40).json()  # the default is cut, a wish is not
        assert out["usage"]["completion_tokens"] == 10


def test_routes_and_methods(server: Running) -> None:
    check(server.http.get("/nope"), 404, "/nope")
    check(server.http.get("/v1/completions"), 405)
    check(server.http.get("/v1/models/nope"), 404, "base", param="model")


def test_an_unexpected_failure_tells_nothing_of_its_inside(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.engine, "make_request", explode)
    response = server.post("/v1/completions", prompt="x")
    check(response, 500)
    assert "secret" not in response.text
    monkeypatch.undo()
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_the_api_key(start: Any) -> None:
    with start(api_key="säcret") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "säcret".encode()}):
            response = server.http.get("/v1/models", headers=headers)
            check(response, 401, "API key")
        assert server.http.get("/stats").status_code == 401
        right = {"authorization": "Bearer säcret".encode()}
        assert server.http.get("/v1/models", headers=right).status_code == 200
        assert [server.http.get(p).status_code for p in ("/health", "/version", "/metrics")] == [200] * 3


def test_too_many_open_requests(start: Any) -> None:
    with start(max_open_requests=2) as server:
        check(server.post("/v1/completions", prompt=["a", "b", "c"]), 429, "try again")
        assert server.post("/v1/completions", prompt=["a", "b"], max_tokens=1).status_code == 200
