"""`bench serve`: times of a stream by a clock that the stream itself moves, arithmetic by hand, whole runs against servers."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from lora_jax.bench import serve, serve_client, serve_metrics
from lora_jax.bench.cli import add_subcommands
from lora_jax.bench.serve_client import Reply
from lora_jax.bench.workload import Item
from lora_jax.cli import main
from lora_jax.cli_args import OptionParser
from lora_jax.errors import ConfigError
from tests.support import fake_openai

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--num-prompts 10 --input-len 6 --output-len 4 --disable-tqdm".split()


# ---- server-sent events ----
def split(*chunks: bytes) -> list[str]:
    async def source():
        for chunk in chunks:
            yield chunk

    async def gather():
        return [event async for event in serve_client.events(source())]

    return asyncio.run(gather())


def test_events_may_be_cut_anywhere():
    text = 'data: {"a": "é\u2028\x85 b"}\r\n\r\n: comment\n\ndata:x\ndata: y\n\nevent: z\n\ndata: [DONE]\n\n'
    want = ['{"a": "é\u2028\x85 b"}', "x\ny", "[DONE]"]
    raw = text.encode()
    assert split(raw) == want
    assert split(*(raw[i : i + 1] for i in range(len(raw)))) == want
    assert split(b"data: lost") == []  # never ended


# ---- times, by a clock that the server's chunks move ----
class Clock(httpx.AsyncByteStream):
    """A body of chunks, each a number of seconds after the one before it; `error` at the end."""

    def __init__(self, *chunks: tuple[float, Any], error: Exception | None = None):
        self.now, self.chunks, self.error = 100.0, chunks, error

    async def __aiter__(self):
        for seconds, data in self.chunks:
            self.now += seconds
            yield f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        if self.error is not None:
            raise self.error


def ask(stream: Clock, status: int = 200, endpoint: str = serve.ENDPOINTS[0]) -> Reply:
    async def go():
        transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=stream))
        async with serve_client.client("http://server", None, 5.0, transport) as http:
            return await serve_client.ask(http, endpoint, {"model": "m"}, lambda: stream.now)

    return asyncio.run(go())


def text(value: str, done: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": value, "finish_reason": done}], **more}


def delta(done: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": done}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}}


def test_times_of_a_completion():
    """A token without text counts, a closing chunk without text does not, and usage and [DONE] come too late to count."""
    reply = ask(
        Clock((2, text("a")), (0.5, text("")), (1, text("b")), (0.25, text("", "length")), (9, USAGE), (9, "[DONE]"))
    )
    assert reply == Reply("m", 100.0, [102.0, 102.5, 103.5], 103.75, 11, 4, 200)
    got = serve_metrics.seconds([reply])
    assert got == dict(ttft=[2.0], tpot=[1.75 / 3], itl=[0.5, 1.0], e2el=[3.75])


def test_times_of_a_chat():
    """Neither the role nor the end is a token; reasoning is."""
    stream = Clock(
        (1, delta(role="assistant", content="")),
        (1, delta(reasoning_content="hm")),
        (2, delta(content="x")),
        (3, delta("stop")),
        (0, "[DONE]"),
    )
    reply = ask(stream, endpoint=serve.ENDPOINTS[1])
    assert (reply.tokens, reply.end, reply.output_tokens, reply.error) == ([102.0, 104.0], 107.0, None, None)
    assert serve_metrics.output_tokens(reply) == 2  # chunks, where the server does not count


def test_an_answer_of_one_invisible_token():
    reply = ask(Clock((3, text("", "stop")), (1, USAGE), (0, "[DONE]")))
    assert (reply.tokens, reply.end, reply.error) == ([103.0], 103.0, None)


def test_usage_in_each_chunk_and_no_done():
    reply = ask(
        Clock((1, text("a", usage=None)), (1, text("b", "stop", usage=dict(prompt_tokens=3, completion_tokens=2))))
    )
    assert (reply.prompt_tokens, reply.output_tokens, reply.error) == (3, 2, None)


@pytest.mark.parametrize(
    ("stream", "status", "words"),
    [
        (Clock((1, text("a"))), 200, "the stream ended early, after 1 chunks"),
        (Clock(), 200, "the stream ended early, after 0 chunks"),
        (Clock((1, "[DONE]")), 200, "the answer holds no tokens"),
        (
            Clock((1, text("a")), (1, {"error": {"message": "no memory"}}), (1, "[DONE]")),
            200,
            "stream failed: no memory",
        ),
        (Clock((1, "{")), 200, "not a chunk of an OpenAI stream: {"),
        (Clock((1, "7"), (1, "[DONE]")), 200, "not a chunk"),
        (Clock((1, {"choices": [{}]})), 200, "not a chunk"),
        (Clock((1, text("a")), error=httpx.ReadError("cut")), 200, "ReadError: cut"),
        (Clock((1, text("a")), error=httpx.ReadTimeout("")), 200, "ReadTimeout"),
        (Clock((1, "x")), 503, "/v1/completions answered 503: data: x"),
    ],
)
def test_what_goes_wrong_is_said(stream, status, words):
    reply = ask(stream, status)
    assert words in (reply.error or "")
    assert serve_metrics.seconds([reply]) == dict(ttft=[], tpot=[], itl=[], e2el=[])


# ---- figures ----
def test_figures_by_hand():
    replies = [
        Reply("base", 0.0, [1.0, 2.0, 4.0], 4.0, 10, 3, 200),
        Reply("sql", 1.0, [4.0], 4.0, None, None, 200),  # one token: no TPOT, no ITL
        Reply("sql", 0.0, [1.0], 1.0, 10, 3, 500, "broken"),
        Reply("sql", 0.0, error="broken"),
    ]
    got = serve_metrics.summarize(replies, [9, 20, 9, 9], 8.0, [50, 99.9])
    assert (got["completed"], got["failed"], got["errors"]) == (2, 2, [{"error": "broken", "requests": 2}])
    assert (got["total_input_tokens"], got["total_output_tokens"], got["tokens_counted_by"]) == (30, 4, "chunks")
    rates = (got["request_throughput"], got["output_throughput"], got["total_token_throughput"])
    assert rates == (2 / 8, 4 / 8, 34 / 8)
    assert got["requests_of_model"] == {"base": 1, "sql": 3}
    assert (got["mean_ttft_ms"], got["median_ttft_ms"], got["std_ttft_ms"]) == (2000, 2000, 1000)
    assert got["p99.9_ttft_ms"] == pytest.approx(2998)
    assert (got["mean_tpot_ms"], got["mean_itl_ms"], got["p50_e2el_ms"]) == (1500, 1500, 3500)

    lines = serve_metrics.table(got, ["ttft", "tpot"], [50, 99.9])
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert "Successful requests:                     2         " in lines
    assert lines[2:4] == ["Failed requests:                         2         ", "  2 x broken"]
    at = lines.index("---------------Time to First Token----------------")
    assert lines[at + 1] == "Mean TTFT (ms):                          2000.00   "
    assert [line.split(":")[0] for line in lines[at + 2 : at + 5]] == [
        "Median TTFT (ms)",
        "P50 TTFT (ms)",
        "P99.9 TTFT (ms)",
    ]
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert not any("Inter-token" in line for line in lines)
    assert any("each chunk of an answer counts as one token" in line for line in lines)


def test_a_metric_without_values_says_so():
    got = serve_metrics.summarize([Reply("m", 0.0, [1.0], 1.0, 1, 1, 200)], [1], 1.0, [99])
    lines = serve_metrics.table(got, ["itl"], [99])
    assert lines[lines.index("---------------Inter-token Latency----------------") + 1].startswith("  no answer")


def test_arrivals():
    def of(rate, burstiness=1.0, seed=0):
        return serve.arrivals(4000, rate, burstiness, np.random.default_rng(seed))

    assert not of(np.inf).any()
    poisson = of(5.0)
    assert poisson[0] == 0 and (np.diff(poisson) > 0).all() and np.array_equal(poisson, of(5.0))
    assert not np.array_equal(poisson, of(5.0, seed=1))
    gaps = np.diff(poisson)
    assert gaps.mean() == pytest.approx(0.2, rel=0.1) and gaps.std() == pytest.approx(0.2, rel=0.1)
    even = np.diff(of(5.0, burstiness=25.0))  # gamma: standard deviation is mean / sqrt(shape)
    assert even.mean() == pytest.approx(0.2, rel=0.05) and even.std() == pytest.approx(0.04, rel=0.1)


def test_requests_in_their_form():
    target = serve.Target("u", serve.ENDPOINTS[0], "base", ("sql",), False, True, 0.5)
    item = Item((7, 9), 3, 0)
    common = dict(max_tokens=3, temperature=0.5, stream=True, stream_options={"include_usage": True})
    assert target.body(item) == dict(model="sql", prompt=[7, 9], ignore_eos=True, **common)
    chat = serve.Target("u", serve.ENDPOINTS[1], "base", (), True, False, 0.5)
    words = f"{serve.WORDS[7]} {serve.WORDS[9]}"
    assert chat.body(Item((7, 9), 3)) == dict(model="base", messages=[{"role": "user", "content": words}], **common)


# ---- whole runs against a server of known answers ----
def bench(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[dict[str, Any], list[str]]:
    assert main(["bench", "serve", *SMALL, *arguments]) == code
    captured = capsys.readouterr()
    if code:
        assert captured.out == "" or "refuses token ids" in captured.out
        return {}, captured.err.splitlines()
    lines = captured.out.splitlines()
    return json.loads(lines[-1]), lines[:-1]


def test_a_run_with_adapters(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    figure = tmp_path / "figure.svg"
    arguments = (
        "--lora-modules sql law --lora-assignment distinct --lora-share 1 --max-concurrency 3 --request-rate 500"
    )
    with fake_openai.running(delay=0.01) as fake:
        got, lines = bench(capsys, "--base-url", fake.url + "/v1/", *arguments.split(), "--plot", str(figure))
    assert (got["completed"], got["failed"], got["model"], got["prompt_format"]) == (10, 0, "base", "tokens")
    assert (got["total_input_tokens"], got["total_output_tokens"], got["tokens_counted_by"]) == (60, 40, "server")
    assert got["requests_of_model"] == {"sql": 5, "law": 5}
    assert fake.most == 3 and fake.keys == {"Bearer secret"} and "secret" not in json.dumps(got)
    assert got["output_throughput"] == pytest.approx(40 / got["duration"])
    assert got["median_itl_ms"] >= 9 and got["median_ttft_ms"] >= 9 and len(got["ttfts"]) == 10
    assert min(got["e2els"]) >= 0.04
    assert lines[0].strip("=").strip() == "Serving Benchmark Result" and "P99 ITL (ms)" in "".join(lines)
    assert "Maximum request concurrency:             3         " in lines
    assert len(fake.bodies) == 11 and "ignore_eos" not in fake.bodies[0][1]
    assert figure.read_text().startswith("<?xml") and got["hardware"]["cores"] >= 1


def test_failures_are_counted_and_shown(capsys):
    with fake_openai.running(bad={1: "500", 3: "error", 4: "early", 6: "garbage", 7: "500"}) as fake:
        got, lines = bench(capsys, "--base-url", fake.url, "--max-concurrency", "1")
    assert (got["completed"], got["failed"], got["total_output_tokens"]) == (5, 5, 20)
    assert {e["error"]: e["requests"] for e in got["errors"]} == {
        "/v1/completions answered 500: out of luck": 2,
        "the stream failed: the engine died": 1,
        "the stream ended early, after 1 chunks": 1,
        "not a chunk of an OpenAI stream: {not json": 1,
    }
    assert "Failed requests:                         5         " in lines
    assert "  2 x /v1/completions answered 500: out of luck" in lines


def test_a_server_that_takes_text_only_and_counts_nothing(capsys):
    with fake_openai.running(takes_ids=False, usage=False) as fake:
        got, lines = bench(capsys, "--base-url", fake.url)
        assert lines[0].startswith("The server refuses token ids") and "prompt must be a string" in lines[0]
        assert (got["prompt_format"], got["tokens_counted_by"]) == ("text", "chunks")
        assert (got["total_input_tokens"], got["total_output_tokens"]) == (60, 40)
        assert all(len(body["prompt"].split()) == 6 for _, body in fake.bodies[1:])
        _, errors = bench(capsys, "--base-url", fake.url, "--prompt-format", "tokens", code=1)
    assert "nothing was measured" in errors[0] and "prompt must be a string" in errors[0]


def test_the_chat_endpoint(capsys):
    with fake_openai.running() as fake:
        got, _ = bench(capsys, "--base-url", fake.url, "--endpoint", serve.ENDPOINTS[1], "--model", "law")
        assert {path for path, _ in fake.bodies} == {serve.ENDPOINTS[1]} and got["requests_of_model"] == {"law": 10}
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (60, 40)


def test_nothing_but_failures_is_an_error(capsys):
    with fake_openai.running(bad=dict.fromkeys(range(1, 11), "500")) as fake:
        _, errors = bench(capsys, "--base-url", fake.url, code=1)
    assert errors == ["lora-jax: error: all 10 requests failed: /v1/completions answered 500: out of luck"]


def test_no_server_no_model(capsys):
    with fake_openai.running() as fake:
        _, errors = bench(capsys, "--base-url", fake.url, "--lora-modules", "sqll", code=2)
        assert "serves no model 'sqll'; it lists base, sql, law" in errors[0]
        port = fake.url.rpartition(":")[2]
    _, errors = bench(capsys, "--port", port, code=1)
    assert f"no server answers at http://127.0.0.1:{port}" in errors[0] and "--base-url" in errors[0]
    with fake_openai.running(models=()) as fake:
        assert "lists no model" in bench(capsys, "--base-url", fake.url, code=1)[1][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--percentile-metrics ttft,speed", "'speed' is no metric; there are ttft, tpot, itl, e2el"),
        ("--metric-percentiles 99,101", "'99,101' is no list"),
        ("--base-url server:80", "must begin with http"),
        ("--request-rate 0", "must be above 0"),
        ("--endpoint /v1/embeddings", "invalid choice"),
        ("--lora-assignment zipf", "needs adapters"),
        ("--endpoint /v1/chat/completions --prompt-format tokens", "takes text only"),
    ],
)
def test_wrong_options(capsys, arguments, words):
    assert words in bench(capsys, *arguments.split(), code=2)[1][0]


def test_e2e_is_another_name():
    assert serve.metrics_of("e2e, ttft,e2el") == ["e2el", "ttft"]
    assert serve.percentiles_of("50,99.9") == [50, 99.9]


def test_a_missing_package_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert "'.[bench]'" in bench(capsys, code=2)[1][0]


def test_neither_jax_nor_an_engine_is_imported():
    code = "import sys; from lora_jax.cli import main; code = main(sys.argv[1:])\n"
    code += "print(code, [m for m in ('jax', 'jaxlib', 'flax', 'transformers', 'lora_jax.engine') if m in sys.modules])"
    with fake_openai.running() as fake:
        command = [sys.executable, "-c", code, "bench", "serve", *SMALL, "--base-url", fake.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "0 []" and '"completed": 10' in done.stdout


# ---- our own server, as a user starts it ----
def test_our_own_server(capsys, tmp_path):
    from tests.server.conftest import wait_for
    from tests.support import text_model, tiny

    text_model.save("qwen3", tmp_path / "model")
    adapter = tiny.save_adapter(tmp_path / "model", tmp_path / "sql", seed=1)
    options = (
        f"--served-model-name base --lora-modules sql={adapter} --port 0 --device cpu --max-num-seqs 4 --disable-tqdm"
    )
    options += " --max-num-batched-tokens 32 --max-loras 1 --max-model-len 256 --shutdown-grace 1"
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), str(tmp_path / "model"), *options.split()]
    process = subprocess.Popen(
        [*command, "--compilation-cache-dir", ""], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)  # type: ignore[arg-type]
    reader.start()
    try:
        wait_for(lambda: process.poll() is not None or any("http://" in line for line in said), 200)
        url = next(word for line in said for word in line.split() if word.startswith("http://"))
        arguments = ["--base-url", url, "--ignore-eos", "--vocab-size", "256", "--lora-modules", "sql"]
        got, _ = bench(capsys, *arguments, "--random-range-ratio", "0.5")
        assert (got["completed"], got["failed"], got["prompt_format"]) == (10, 0, "tokens")
        parser = OptionParser()
        add_subcommands(parser)
        wanted = parser.parse_all(["serve", *SMALL, *arguments, "--random-range-ratio", "0.5"])
        assert_tokens(got, wanted)
        assert 0 < got["requests_of_model"]["sql"] < 10 and got["tokens_counted_by"] == "server"
        stats = httpx.get(url + "/stats", trust_env=False, timeout=30).json()
        assert stats["generation_tokens"] >= got["total_output_tokens"] and stats["running"] == 0
        chat, _ = bench(capsys, "--base-url", url, "--ignore-eos", "--endpoint", serve.ENDPOINTS[1])
        assert (chat["completed"], chat["total_output_tokens"]) == (10, 40)
    finally:
        process.terminate()
        process.wait(30)
        reader.join(10)
        process.stdout.close()


def assert_tokens(got: dict[str, Any], options: argparse.Namespace) -> None:
    """The server saw exactly the prompts, and gave exactly the tokens, that the options ask for."""
    from lora_jax.bench import workload

    items = workload.random_items(options, options.num_prompts, 1, options.vocab_size, options.seed)
    assert got["total_input_tokens"] == sum(len(i.prompt_token_ids) for i in items)
    assert got["total_output_tokens"] == sum(i.output_len for i in items)


def test_percentiles_need_numbers():
    with pytest.raises(ConfigError):
        serve.percentiles_of("")
