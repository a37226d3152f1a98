"""`bench serve`: load on a running OpenAI-compatible server, whoever made it. No engine is started and jax never imported."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import math
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..errors import ConfigError, LoraJaxError
from . import report, serve_metrics, workload
from .plot import Panel
from .rounds import count, positive
from .workload import Item

if TYPE_CHECKING:
    from .serve_client import Reply

HELP = "load on a running OpenAI-compatible server"
DESCRIPTION = (
    "Send random prompts to a running OpenAI-compatible server, at a rate or all at once, and report throughput and "
    "latencies as vllm bench serve does. Adapters are chosen by model name. A key is taken from OPENAI_API_KEY."
)
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
REFUSED = (400, 422)  # statuses of a request that the server does not take
WORDS = "time year people way day man thing woman life child world school state family student group country problem".split()
# What a server's error says: that a prompt has to be a string; that a token is not one of the model's.
WANTS_TEXT = re.compile(r"\bstr(ing)?s?\b|token[ _-]?(ids|lists?)\b.* (not|un)[ -]?supported|takes? text only", re.I)
UNKNOWN_TOKEN = re.compile(r"\b(outside|out of|not in|exceeds?) (the |model )?vocab|\btoken .* in \[0, \d+\)", re.I)
RAW = ("ttft", "e2el")  # metrics whose single values stand in the result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, named as in `vllm bench serve` where it has them."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", metavar="URL", help="of the server, such as http://host:8000 (instead of host and port)"
    )
    group.add_argument("--host", default="127.0.0.1", help="of the server")
    group.add_argument("--port", type=_port, default=8000, metavar="N", help="of the server")
    group.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="what is asked")
    group.add_argument(
        "--model", metavar="NAME", help="the base model's name (default: the first that the server lists)"
    )
    group.add_argument(
        "--request-timeout",
        type=workload.positive_number,
        default=3600.0,
        metavar="SECONDS",
        help="without a new chunk",
    )
    group = parser.add_argument_group("load")
    workload.add_length_arguments(group, 100, 128, 128)
    group.add_argument(
        "--request-rate",
        type=workload.positive_number,
        default=math.inf,
        metavar="X",
        help="requests a second, arrivals as in a Poisson process (default: inf, all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=workload.positive_number,
        default=1.0,
        metavar="X",
        help="of the arrivals: 1 is Poisson, less comes in bursts, more is more even",
    )
    group.add_argument("--max-concurrency", type=positive, metavar="N", help="requests under way at once")
    group.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME", help="adapters to ask, by model name")
    workload.add_assignment_arguments(group)
    group.add_argument(
        "--ignore-eos", action="store_true", help="all answers have their full length, if the server can"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of the sampling")
    group.add_argument(
        "--prompt-format",
        choices=("auto", "tokens", "text"),
        default="auto",
        help="token ids, or words of about one token each; auto: token ids unless the server says that it takes strings only",
    )
    group.add_argument("--vocab-size", type=positive, default=32000, metavar="N", help="token ids are drawn below this")
    group.add_argument("--num-warmups", type=positive, default=1, metavar="N", help="requests before, not timed")
    group.add_argument("--seed", type=count, default=0, metavar="N", help="of lengths, prompts and arrivals")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST", help="of ttft,tpot,itl,e2el")
    group.add_argument(
        "--metric-percentiles", default="99", metavar="LIST", help="percentiles of them, such as 50,90,99"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


@dataclass(frozen=True)
class Target:
    """Where requests go and in which form."""

    url: str
    endpoint: str
    model: str
    lora_modules: tuple[str, ...]
    as_text: bool
    ignore_eos: bool
    temperature: float

    def body(self, item: Item) -> dict[str, Any]:
        """The JSON of one request."""
        words = " ".join(WORDS[t % len(WORDS)] for t in item.prompt_token_ids) if self.as_text else ""
        common = {
            "model": self.model if item.adapter is None else self.lora_modules[item.adapter],
            "max_tokens": item.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if self.ignore_eos else {})
        if self.endpoint == ENDPOINTS[1]:
            return common | {"messages": [{"role": "user", "content": words}]}
        return common | {"prompt": words if self.as_text else list(item.prompt_token_ids)}


def run(options: argparse.Namespace, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the benchmark, shows its block of lines and returns its result. Raises: LoraJaxError."""
    shown, percentiles = metrics_of(options.percentile_metrics), percentiles_of(options.metric_percentiles)
    assignment = workload.assignment_of(options, len(options.lora_modules))
    if options.endpoint == ENDPOINTS[1] and options.prompt_format == "tokens":
        raise ConfigError(f"--prompt-format tokens: {options.endpoint} takes text only")
    _need_httpx()
    items = workload.random_items(
        options, options.num_prompts, len(options.lora_modules), options.vocab_size, options.seed
    )
    target, replies, duration = asyncio.run(_run(options, items, show))
    result = {
        "model": target.model,
        "base_url": target.url,
        "endpoint": target.endpoint,
        "prompt_format": "text" if target.as_text else "tokens",
        **{k: getattr(options, k) for k in ("num_prompts", "input_len", "output_len", "random_range_ratio", "seed")},
        **{k: getattr(options, k) for k in ("burstiness", "max_concurrency", "ignore_eos", "temperature")},
        "request_rate": None if math.isinf(options.request_rate) else options.request_rate,
        "lora_modules": options.lora_modules,
        "lora_assignment": assignment,
        "lora_share": workload.share_of(options, len(options.lora_modules)),
        **serve_metrics.summarize(replies, [len(i.prompt_token_ids) for i in items], duration, percentiles),
        **{f"{name}s": serve_metrics.seconds(replies)[name] for name in RAW},
        "hardware": {"note": "of the client; the server's is not known", **report.host()},
    }
    if not result["completed"]:
        raise LoraJaxError(f"all {len(items)} requests failed: " + "; ".join(e["error"] for e in result["errors"]))
    for line in serve_metrics.table(result, shown, percentiles):
        show(line)
    return result


def metrics_of(text: str) -> list[str]:
    """Names of METRICS from a list with commas; vLLM's e2el may be called e2e. Raises: ConfigError."""
    names = [{"e2e": "e2el"}.get(name.strip(), name.strip()) for name in text.split(",") if name.strip()]
    for name in names:
        if name not in serve_metrics.METRICS:
            known = ", ".join(serve_metrics.METRICS)
            raise ConfigError(f"--percentile-metrics: {name!r} is no metric; there are {known}")
    return list(dict.fromkeys(names))


def percentiles_of(text: str) -> list[float]:
    """Raises: ConfigError."""
    try:
        values = [float(part) for part in text.split(",")]
        if not all(0 <= value <= 100 for value in values):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--metric-percentiles: {text!r} is no list of numbers in [0, 100], such as 50,99") from None
    return values


def _need_httpx() -> None:
    try:
        importlib.import_module("httpx")
    except ModuleNotFoundError:
        raise ConfigError(
            "bench serve needs the package httpx: install the extra 'bench', in a checkout pip install -e '.[bench]'"
        ) from None


def arrivals(number: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Seconds [number] from the first request to each; intervals are gamma distributed with shape `burstiness`, mean 1/rate."""
    if math.isinf(rate):
        return np.zeros(number)
    intervals = rng.gamma(burstiness, 1 / (rate * burstiness), number)
    return np.cumsum(intervals) - intervals[0]


def _port(text: str) -> int:
    value = positive(text)
    if value > 65_535:
        raise argparse.ArgumentTypeError(f"must be <= 65535, got {value}")
    return value


# ---- the traffic -----------------------------------------------------------------------------------------------------
async def _run(
    options: argparse.Namespace, items: Sequence[Item], show: Callable[[str], None]
) -> tuple[Target, list[Reply], float]:
    from . import serve_client

    url = (options.base_url or f"http://{_bracketed(options.host)}:{options.port}").rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {url}: must begin with http:// or https://")
    try:
        urllib.parse.urlsplit(url).port  # noqa: B018  reads it
    except ValueError as e:
        raise ConfigError(f"--base-url {url}: {e}") from None
    key = os.environ.get("OPENAI_API_KEY")  # no option: the result holds the command line
    async with serve_client.client(url, key, options.request_timeout) as http:
        models = await serve_client.models(http)
        for name in [*([options.model] if options.model else []), *options.lora_modules]:
            if name not in models:
                raise ConfigError(f"{url} serves no model {name!r}; it lists {', '.join(models) or 'none'}")
        as_text = options.endpoint == ENDPOINTS[1] or options.prompt_format == "text"
        target = Target(
            url,
            options.endpoint,
            options.model or models[0],
            tuple(options.lora_modules),
            as_text,
            options.ignore_eos,
            options.temperature,
        )
        target = await _try_out(http, target, options, items, show)
        at = arrivals(len(items), options.request_rate, options.burstiness, np.random.default_rng(options.seed))
        with tqdm(total=len(items), desc="serve", unit="request", disable=options.disable_tqdm) as bar:
            replies, duration = await send_all(http, target, items, at, options.max_concurrency, bar.update)
        return target, replies, duration


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _try_out(
    http: Any, target: Target, options: argparse.Namespace, items: Sequence[Item], show: Callable[[str], None]
) -> Target:
    """The warm-up requests, one after the other. Returns the target, with text prompts where the server wants strings.

    Raises: LoraJaxError when one fails, for whatever other reason.
    """
    from .serve_client import ask

    for item in (items[i % len(items)] for i in range(options.num_warmups)):
        reply = await ask(http, target.endpoint, target.body(item))
        if not target.as_text and options.prompt_format == "auto" and refuses_ids(reply):
            show(f"The server refuses token ids, so prompts are text, of about as many tokens. ({reply.error})")
            target = replace(target, as_text=True)
            reply = await ask(http, target.endpoint, target.body(item))
        if reply.error is not None:
            message = f"the first request to {target.url} failed, nothing was measured: {reply.error}"
            if reply.status in REFUSED and not target.as_text and UNKNOWN_TOKEN.search(reply.error):
                message += f" (token ids are drawn below {options.vocab_size}: give the model's with --vocab-size)"
            raise LoraJaxError(message)
    return target


def refuses_ids(reply: Reply) -> bool:
    """Whether the server said that prompts must be strings, not that this prompt, or another field, is wrong."""
    return reply.status in REFUSED and WANTS_TEXT.search(reply.error or "") is not None


async def send_all(
    http: Any,
    target: Target,
    items: Sequence[Item],
    at: np.ndarray,
    max_concurrency: int | None,
    progress: Callable[[], Any] = lambda: None,
) -> tuple[list[Reply], float]:
    """Sends item i `at[i]` seconds after the start, later where max_concurrency are under way. Returns replies in the order of
    the items, and seconds until the last."""
    from .serve_client import ask

    gate = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    begin = time.perf_counter()

    async def one(item: Item, moment: float) -> Reply:
        await asyncio.sleep(max(0.0, begin + moment - time.perf_counter()))
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
            reply = await ask(http, target.endpoint, target.body(item))
        progress()
        return reply

    replies = await asyncio.gather(*(one(item, float(moment)) for item, moment in zip(items, at, strict=True)))
    return list(replies), time.perf_counter() - begin


def chart(result: dict[str, Any]) -> list[Panel]:
    """Distributions: share of the requests whose first token, and whose end, came within so many seconds."""
    panels = []
    for name in RAW:
        values = sorted(result[f"{name}s"])
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        panels.append(
            Panel(serve_metrics.METRICS[name][1], "requests within", "%", {name: shares}, values, "seconds", "lines")
        )
    return panels
