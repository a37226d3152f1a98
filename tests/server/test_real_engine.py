"""scripts/serve.py as a user runs it: one process, a real model with two adapters, the official client."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.server.conftest import wait_for
from tests.server.test_connections import send
from tests.support import text_model, tiny
from tests.support.text_model import TOLERANCE, TextModel

ROOT = Path(__file__).parents[2]
NAMES = ("base", "a", "b")
N = 10
GREEDY: dict[str, Any] = dict(temperature=0, extra_body={"ignore_eos": True})

CLIENT = """
import http.client, json, sys
body = json.dumps({"prompt": ["Hello"] * 64, "max_tokens": 200, "ignore_eos": True, "stream": True})
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
print(connection.getresponse().readline().decode(), flush=True)
sys.stdin.read()
"""


@dataclass
class Served:
    """The process, its output, and what transformers and PEFT say about the models that it serves."""

    process: subprocess.Popen
    reference: TextModel
    lines: list[str] = field(default_factory=list)
    url: str = ""
    client: Any = None

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def stats(self) -> dict[str, Any]:
        return httpx.get(self.url + "/stats", trust_env=False, timeout=30).json()

    def hits(self) -> dict[str, int]:
        return {row["key"]: row["hits"] for row in self.stats()["step_table"]}

    def greedy(self, model: str, prompt: str | list[int]) -> tuple[list[int], float]:
        return self.reference.greedy(prompt, None if model == "base" else model)

    def prompts(self) -> list[str]:
        """Three whose continuations are certain for every model."""
        return list(itertools.islice(self.reference.prompts(), 3))

    def complete(self, model: str, prompt: Any, **more: Any) -> Any:
        return self.client.completions.create(**{"model": model, "prompt": prompt, "max_tokens": N, **GREEDY, **more})

    def chat(self, model: str, text: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(
            **{"model": model, "messages": messages, "max_tokens": N, **GREEDY, **more}
        )

    def chat_ids(self, text: str) -> list[int]:
        return self.reference.chat_ids([{"role": "user", "content": text}])

    def idle(self) -> bool:
        stats = self.stats()
        return stats["running"] == stats["waiting"] == 0 and stats["free_pages"] == stats["num_pages"] - 1


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    tokenizer = text_model.save("qwen3", root / "model")
    adapters = {name: tiny.save_adapter(root / "model", root / name, seed=i) for i, name in enumerate(NAMES[1:])}
    options = ["--served-model-name", "base", "--lora-modules", *(f"{n}={p}" for n, p in adapters.items())]
    options += ["--port", "0", "--device", "cpu", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    options += ["--max-loras", "2", "--max-model-len", "256", "--compilation-cache-dir", "", "--shutdown-grace", "1"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "serve.py"), str(root / "model"), *options, "--disable-tqdm"],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    oracles = {None: tiny.Oracle(root / "model"), **{n: tiny.Oracle(root / "model", p) for n, p in adapters.items()}}
    served = Served(process, TextModel(root / "model", tokenizer, oracles, N))
    reader = threading.Thread(target=served.read, daemon=True)
    reader.start()
    ready = lambda: [line for line in served.lines if line.startswith("lora-jax: http://")]  # noqa: E731
    try:
        wait_for(lambda: ready() or process.poll() is not None, 200)
        assert ready(), served.lines
        served.url = ready()[0].split()[1]
        with openai.OpenAI(
            base_url=served.url + "/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            http_client=httpx.Client(trust_env=False),
        ) as served.client:
            yield served
        stop_while_busy(served)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


def stop_while_busy(served: Served) -> None:
    """The last check, at the fixture's end so that it does not depend on the tests' order."""
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20) as sock:
        send(sock, prompt=["Hello"] * 128, max_tokens=240, ignore_eos=True)
        wait_for(lambda: served.stats()["running"] == 4)
        served.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b" 503 " in answer.splitlines()[0] and b"shutting down" in answer
    assert served.process.wait(15) == 0
    assert not any("Traceback" in line for line in served.lines), served.lines


def test_the_models_are_listed(server):
    cards = {card.id: card for card in server.client.models.list()}
    assert list(cards) == list(NAMES)
    assert [cards[name].parent for name in NAMES] == [None, "base", "base"] and cards["base"].max_model_len == 256
    assert server.lines.count(f"lora-jax: {server.url} serves base; adapters: a, b") == 1


def test_every_model_at_once_equals_the_reference(server):
    """Completions and chats of the base and both adapters, together."""
    prompts, before = server.prompts(), server.hits()
    calls = [(kind, model, text) for text in prompts for model in NAMES for kind in ("complete", "chat")]
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(pool.map(lambda call: getattr(server, call[0])(*call[1:]), calls))
    texts = set()
    for (kind, model, text), answer in zip(calls, answers, strict=True):
        ids = server.reference.encode(text) if kind == "complete" else server.chat_ids(text)
        tokens, margin = server.greedy(model, ids)
        choice = answer.choices[0]
        got = choice.text if kind == "complete" else choice.message.content
        if margin > TOLERANCE:  # of the completions always, of a chat nearly always
            assert got == server.reference.decode(tokens), (kind, model, text)
        assert answer.model == model and choice.finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), N)
        texts.add(got)
    assert len(texts) == len(calls), "two models, or two prompts, gave the same text"
    ran = {key for key, hits in server.hits().items() if hits > before[key]}
    assert any(key.startswith("decode[4]+lora") for key in ran), ran
    assert any(key.startswith("prefill") and "+lora" in key for key in ran), ran


def test_the_base_alone_runs_the_steps_without_lora(server):
    before, text = server.hits(), server.prompts()[0]
    server.complete("base", text)
    middle = server.hits()
    server.complete("a", text)
    after = server.hits()
    ran = lambda x, y: {key for key in x if y[key] > x[key] and key.startswith(("decode", "prefill"))}  # noqa: E731
    assert ran(before, middle) == {"decode[1]", "prefill[32]"}
    assert ran(middle, after) == {"decode[1]+lora", "prefill[32]+lora"}
    stats = server.stats()
    assert stats["compilations_after_warmup"] == 0 and stats["loras"] == ["a", "b"] and stats["failed_steps"] == 0


@pytest.mark.parametrize("model", NAMES)
def test_streams_say_what_whole_answers_say(server, model):
    text = server.prompts()[1]
    whole = server.complete(model, text, logprobs=2).choices[0]
    chunks = [c.choices[0] for c in server.complete(model, text, logprobs=2, stream=True)]
    assert "".join(c.text for c in chunks) == whole.text and len(chunks) > 3
    assert [t for c in chunks if c.logprobs for t in c.logprobs.tokens] == whole.logprobs.tokens
    assert [c.finish_reason for c in chunks][-1] == "length"
    whole = server.chat(model, text).choices[0]
    chunks = [c.choices[0] for c in server.chat(model, text, stream=True)]
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason == "length"


@pytest.mark.parametrize("model", ["base", "b"])
def test_logprobs_equal_the_reference(server, model):
    text = server.prompts()[2]
    ids = server.reference.encode(text)
    tokens, _ = server.greedy(model, ids)
    want = server.reference.oracles[None if model == "base" else model].logprobs(ids + tokens)[len(ids) - 1 :]
    got = server.complete(model, text, logprobs=2).choices[0].logprobs
    chosen = [want[i, t] for i, t in enumerate(tokens)]
    assert got.token_logprobs == pytest.approx(chosen, abs=TOLERANCE)
    for i, top in enumerate(got.top_logprobs):  # by text: two parts of a character may share a key
        assert max(top.values()) == pytest.approx(want[i].max(), abs=TOLERANCE)
    ids = server.chat_ids(text)
    content = server.chat(model, text, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    tokens, _ = server.greedy(model, ids)
    want = server.reference.oracles[None if model == "base" else model].logprobs(ids + tokens)[len(ids) - 1 :]
    first = content[0]
    assert first.logprob == pytest.approx(want[0].max(), abs=TOLERANCE)
    assert [c.logprob for c in first.top_logprobs] == pytest.approx(np.sort(want[0])[:-4:-1], abs=TOLERANCE)
    assert first.token == server.reference.decode([tokens[0]]) and len(content) == N


def test_an_unknown_model_is_a_404_that_lists_the_names(server):
    for call in (server.complete, server.chat):
        with pytest.raises(openai.NotFoundError, match="'nobody' does not exist; available: base, a, b") as e:
            call("nobody", "x")
        assert e.value.body["code"] == "model_not_found"


def test_what_does_not_fit_is_a_400(server):
    with pytest.raises(openai.BadRequestError, match="256"):
        server.complete("a", [5] * 300)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        server.complete("a", [5] * 250, max_tokens=10)


def test_a_killed_client_gives_its_pages_back(server):
    """64 prompts of 200 tokens each wait when the client is killed; nobody computes them."""
    wait_for(server.idle)
    before = server.stats()["generation_tokens"]
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.url.rpartition(":")[2]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(client.wait, 20)
        stack.callback(client.kill)
        assert client.stdin is not None and client.stdout is not None
        stack.callback(client.stdin.close)
        stack.callback(client.stdout.close)
        assert client.stdout.readline().startswith("data: ")
        stats = server.stats()
        assert stats["running"] == 4 and stats["free_pages"] < stats["num_pages"] - 1
        client.send_signal(signal.SIGKILL)
    wait_for(server.idle)
    assert server.stats()["generation_tokens"] - before < 64 * 200 / 2
    text = server.prompts()[0]
    tokens, _ = server.greedy("a", text)
    assert server.complete("a", text).choices[0].text == server.reference.decode(tokens)
