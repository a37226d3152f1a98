"""`bench serve` and a server that refuses the first request: text prompts only where the server wants strings."""

from __future__ import annotations

import pytest

from lora_jax.bench import serve
from lora_jax.bench.serve_client import Reply
from lora_jax.cli import main
from tests.support import fake_openai


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("the prompt has 100000 tokens, and max_model_len=256 leaves no room for an answer", False),
        ("max_tokens=9000 and 6 prompt tokens exceed max_model_len=256", False),
        ("This model's maximum context length is 256 tokens. However, you requested 9000 tokens", False),
        ("prompt token 31000 is not an integer in [0, 257)", True),
        ("Token id 31000 is out of vocabulary", True),
    ],
)
def test_another_400_is_shown_and_ends_it(capsys, message, hint):
    with fake_openai.running(bad={0: message}) as fake:
        assert main(["bench", "serve", "--base-url", fake.url, "--num-prompts", "2", "--disable-tqdm"]) == 1
        assert len(fake.bodies) == 1
    out, err = capsys.readouterr()
    errors = err.splitlines()
    assert out == "" and message in errors[0] and ("--vocab-size" in errors[0]) is hint and len(errors) == 1


@pytest.mark.parametrize(
    "message", ["Input should be a valid string", "prompt: str type expected", "a list, not strings"]
)
def test_words_of_a_server_that_wants_strings(message):
    assert serve.refuses_ids(Reply("m", 0.0, status=422, error=f"/v1/completions answered 422: {message}"))
    assert not serve.refuses_ids(Reply("m", 0.0, status=500, error=message))
