"""What completions and chat share: from a body to engine requests, and from their outputs to usage counts."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import RequestError
from ..request import Logprobs, LoRARequest, Prompt, Request, SamplingParams, StepOutput, continuations
from .catalog import Catalog
from .engine_api import ServedEngine
from .http import HTTPError
from .metrics import Metrics
from .protocol import SamplingBody
from .worker import EngineWorker

T = TypeVar("T")


@dataclass
class Collected:
    """Everything that one request has produced."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Serving:
    """The context of every endpoint. `executor` runs what would hold up the event loop (tokenizing, templates)."""

    def __init__(
        self,
        engine: ServedEngine,
        worker: EngineWorker,
        catalog: Catalog,
        metrics: Metrics,
        executor: Executor,
        max_open: int,
    ):
        self.engine, self.worker, self.catalog, self.metrics = engine, worker, catalog, metrics
        self.executor, self.max_open = executor, max_open

    async def in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

    def params(self, body: SamplingBody, **more: Any) -> SamplingParams:
        """Raises RequestError naming the field."""
        params = body.sampling_params(self.engine.defaults.as_sampling_overrides(), **more)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.engine.max_logprobs:
                field_name = (
                    "top_logprobs" if name == "logprobs" and "top_logprobs" in type(body).model_fields else name
                )
                text = f"{field_name}={value} is more than this server allows ({self.engine.max_logprobs})"
                raise RequestError(text, field_name)
        return params

    async def make_requests(
        self,
        prefix: str,
        prompts: Callable[[], Sequence[Prompt]],
        params: SamplingParams,
        lora: LoRARequest | None,
        asked_max_tokens: int | None,
    ) -> list[Request]:
        """Tokenizes and checks, in a thread. `prompts` is called there too. Of each prompt params.n requests, side by side."""
        self.worker.check_open()
        self._check_room(params.n)

        def make() -> list[Request]:
            asked = prompts()
            self._check_room(len(asked) * params.n)
            made = [self.engine.make_request(prompt, params, lora, f"{prefix}-{i}") for i, prompt in enumerate(asked)]
            return [each for request in made for each in continuations(request)]

        requests = await self.in_thread(make)
        limit = self.engine.max_model_len
        for request in requests:
            n = len(request.prompt_token_ids)
            if asked_max_tokens is not None and n + asked_max_tokens > limit:
                text = f"the prompt has {n} tokens and max_tokens is {asked_max_tokens}, together"
                raise HTTPError(
                    400,
                    f"{text} {n + asked_max_tokens}; this model takes {limit} (max_model_len)",
                    "max_tokens",
                    "context_length_exceeded",
                )
        return requests

    def _check_room(self, more: int) -> None:
        if self.worker.open_requests + more > self.max_open:
            raise HTTPError(429, f"{self.worker.open_requests} requests are open already: try again later")

    async def run(self, model: str, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """(index of the request, what is new), until all are finished; the first failure is raised.

        Raises: HTTPError 429 when too many requests are open.
        """
        self._check_room(len(requests))
        index = {request.request_id: i for i, request in enumerate(requests)}
        trackers = [self.metrics.track(model, 0 if r.index else len(r.prompt_token_ids)) for r in requests]
        outcome = "error"
        try:
            async with aclosing(self.worker.generate_many(requests)) as outputs:
                async for output in outputs:
                    trackers[index[output.request_id]].add(output)
                    if output.error is not None:
                        raise output.error
                    yield index[output.request_id], output
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "abort"
            raise
        finally:
            for tracker in trackers:
                tracker.end(outcome)

    async def collect(self, model: str, requests: Sequence[Request]) -> list[Collected]:
        results = [Collected() for _ in requests]
        parts: list[list[str]] = [[] for _ in requests]
        async with aclosing(self.run(model, requests)) as outputs:
            async for i, output in outputs:
                result = results[i]
                parts[i].append(output.text)
                result.token_ids += output.token_ids
                result.logprobs += output.logprobs or []
                result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs
                result.finish_reason, result.stop_reason = output.finish_reason, output.stop_reason
        for result, texts in zip(results, parts, strict=True):
            result.text = "".join(texts)
        return results


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
