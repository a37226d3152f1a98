"""One streamed request to an OpenAI-compatible server, by httpx, and the moments at which its tokens came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..errors import LoraJaxError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
QUOTED = 300  # characters of a server's answer in an error


@dataclass
class Reply:
    """Times by the caller's clock, in seconds. tokens: when each chunk with a token came; end: the last chunk of the answer.

    prompt_tokens, output_tokens: the server's own count, None where it gives none. error: what went wrong, None: nothing.
    """

    model: str
    begin: float
    tokens: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    status: int | None = None
    error: str | None = None


def client(base_url: str, api_key: str | None, timeout: float, transport: Any = None) -> httpx.AsyncClient:
    """Without a limit on connections. timeout: seconds between two chunks. Proxies are used for other machines only."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0), pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=urlsplit(base_url).hostname not in LOOPBACK,
        transport=transport,
    )


async def models(http: httpx.AsyncClient) -> list[str]:
    """Names that the server lists, at least one. Raises: LoraJaxError."""
    url = str(http.base_url).rstrip("/")
    try:
        answer = await http.get("/v1/models")
        answer.raise_for_status()
        names = [str(entry["id"]) for entry in answer.json()["data"]]
    except httpx.HTTPStatusError as exc:
        raise LoraJaxError(
            f"{url}/v1/models answered {exc.response.status_code}: {_message(exc.response.text)}"
        ) from None
    except httpx.HTTPError as exc:
        raise LoraJaxError(f"no server answers at {url} ({_why(exc)}): start one, or name it with --base-url") from None
    except (ValueError, LookupError, TypeError):
        raise LoraJaxError(f"{url}/v1/models is no list of models: is this an OpenAI-compatible server?") from None
    if not names:
        raise LoraJaxError(f"{url} lists no model")
    return names


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


async def ask(
    http: httpx.AsyncClient, endpoint: str, body: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter
) -> Reply:
    """Streams one answer. Never raises for what a server does: the reply says what went wrong."""
    reply = Reply(str(body["model"]), clock())
    try:
        async with http.stream("POST", endpoint, json=body) as answer:
            reply.status = answer.status_code
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                reply.error = f"{endpoint} answered {answer.status_code}: {_message(text)}"
            else:
                await _stream(answer, reply, clock)
    except httpx.HTTPError as exc:
        reply.error = _why(exc)
    return reply


async def _stream(answer: httpx.Response, reply: Reply, clock: Callable[[], float]) -> None:
    finished = False
    async for data in events(answer.aiter_bytes()):
        now = clock()
        if data == "[DONE]":
            finished = True
        elif reply.error is None:  # the rest is read all the same: only then can the connection be used again
            try:
                finished |= _take(json.loads(data), reply, now)
            except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
                reply.error = f"not a chunk of an OpenAI stream: {data[:QUOTED]}"
    if reply.error is not None:
        return
    if not finished:
        reply.error = f"the stream ended early, after {len(reply.tokens)} chunks"
    elif not reply.tokens:
        if not reply.end:
            reply.error = "the answer holds no tokens"
        reply.tokens = [reply.end]


def _take(chunk: dict[str, Any], reply: Reply, now: float) -> bool:
    """Puts one chunk's news into the reply. Returns whether it says that the answer is complete."""
    if "error" in chunk:
        reply.error = f"the stream failed: {_message(json.dumps(chunk))}"
        return False
    if usage := chunk.get("usage"):  # with its own last chunk, or with every one
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        if not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError(f"usage {usage}")
        reply.prompt_tokens, reply.output_tokens = counts
    if not (choices := chunk.get("choices")):
        return False
    choice = choices[0]
    reply.end = now
    done = choice.get("finish_reason") is not None
    if _has_token(choice, done):
        reply.tokens.append(now)
    return done


def _has_token(choice: dict[str, Any], done: bool) -> bool:
    """A completion's chunk without text is a token that shows nothing, unless it only says that the answer is complete; a
    chat's is the role, or the end."""
    if "delta" not in choice:
        return bool(choice["text"]) or not done
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event.

    Split at line ends of the protocol alone: httpx's own lines end at any Unicode line separator, which JSON text may hold.
    """
    rest, data = b"", []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in (raw.removesuffix(b"\r") for raw in lines):
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield "\n".join(data)
                data = []


def _message(text: str) -> str:
    """An OpenAI error's message, or the answer's beginning."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:QUOTED]
    except (ValueError, TypeError, LookupError, RecursionError):
        return text[:QUOTED].strip() or "(empty)"
