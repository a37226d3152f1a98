"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ..errors import RequestError
from ..request import Prompt, Request, StepOutput, TokensPrompt
from .logprobs import CompletionLogprobs, prompt_logprobs
from .protocol import CompletionRequest
from .serving import Collected, Serving, new_id, now, usage


class Completion:
    """One call. `prepare` makes the engine requests; then `full` or `chunks` answers."""

    def __init__(self, serving: Serving, body: CompletionRequest):
        self.serving, self.body = serving, body
        self.model, self.lora = serving.catalog.resolve(body.model)
        self.head = {"id": new_id("cmpl"), "object": "text_completion", "created": now(), "model": self.model}
        self.requests: list[Request] = []  # of each prompt its continuations
        self.echoes: list[str] = []

    @property
    def prompt_only(self) -> bool:
        """echo with max_tokens=0 scores a prompt. The engine makes one token at least; it is not shown."""
        return bool(self.body.echo) and self.body.max_tokens == 0

    async def prepare(self) -> None:
        body, more = self.body, {}
        if body.logprobs is not None:
            more["logprobs"] = body.logprobs
            if body.echo and body.prompt_logprobs is None:
                more["prompt_logprobs"] = body.logprobs
        if self.prompt_only:
            more["max_tokens"] = 1
        params = self.serving.params(body, **more)
        self.requests = await self.serving.make_requests(
            str(self.head["id"]), self._prompts, params, self.lora, body.max_tokens
        )
        if body.echo:
            self.echoes = await self.serving.in_thread(lambda: [self._prompt_text(prompt) for prompt in body.prompts()])

    def _prompts(self) -> Sequence[Prompt]:
        out: list[Prompt] = []
        tokenizer = self.serving.engine.tokenizer
        for prompt in self.body.prompts():
            if isinstance(prompt, list):
                out.append(TokensPrompt(prompt_token_ids=prompt))
            elif self.body.add_special_tokens is False and tokenizer is not None:
                out.append(TokensPrompt(prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=False)))
            else:
                out.append(prompt)
        return out

    def _prompt_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.serving.engine.tokenizer
        if tokenizer is None:
            raise RequestError("echo needs a tokenizer, and this model has none", "echo")
        return tokenizer.decode(prompt, skip_special_tokens=False)

    async def full(self) -> dict[str, Any]:
        results = await self.serving.collect(self.model, self.requests)
        choices = [self._choice(i, result) for i, result in enumerate(results)]
        completion = 0 if self.prompt_only else sum(len(result.token_ids) for result in results)
        return {**self.head, "choices": choices, "usage": usage(self._prompt_tokens(), completion)}

    def _prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests if not request.index)

    def _echo(self, i: int) -> str:
        """The text of the i-th request's prompt."""
        return self.echoes[i * len(self.echoes) // len(self.requests)]

    def _choice(self, i: int, result: Collected) -> dict[str, Any]:
        if self.prompt_only:
            result.text, result.token_ids, result.logprobs = "", [], []
            result.finish_reason, result.stop_reason = "length", None
        logprobs = CompletionLogprobs() if self.body.logprobs is not None else None
        rendered = None
        if logprobs is not None:
            ids, candidates = self._with_prompt(i, result.token_ids, result.logprobs, result.prompt_logprobs)
            rendered = logprobs.render(ids, candidates)
        choice = {
            "index": i,
            "text": (self._echo(i) if self.body.echo else "") + result.text,
            "logprobs": rendered,
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        return choice

    def _with_prompt(self, i: int, ids: list[int], candidates: Any, of_prompt: Any) -> tuple[list[int], list[Any]]:
        """With echo the prompt's tokens come first."""
        if not self.body.echo or of_prompt is None:
            return ids, list(candidates or [])
        return [*self.requests[i].prompt_token_ids, *ids], [*of_prompt, *(candidates or [])]

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        state = [_Streamed() for _ in self.requests]
        async with aclosing(self.serving.run(self.model, self.requests)) as outputs:
            async for i, output in outputs:
                chunk = self._chunk(i, output, state[i])
                if chunk is not None:
                    yield chunk
        if self.body.include_usage:
            completion = sum(s.tokens for s in state)
            yield {**self.head, "choices": [], "usage": usage(self._prompt_tokens(), completion)}

    def _chunk(self, i: int, output: StepOutput, state: _Streamed) -> dict[str, Any] | None:
        ids, text, candidates = output.token_ids, output.text, output.logprobs
        reasons = output.finish_reason, output.stop_reason
        if self.prompt_only:
            ids, text, candidates = [], "", None
            reasons = (output.finish_reason and "length"), None
        state.tokens += len(ids)
        rendered = None
        if self.body.logprobs is not None:
            ids, candidates = self._with_prompt(i, ids, candidates, output.prompt_logprobs)
            rendered = state.logprobs.render(ids, candidates) if ids else None
        if self.body.echo and not state.echoed:
            state.echoed, text = True, self._echo(i) + text
        if not text and not rendered and not reasons[0]:
            return None  # part of a character, or of what may become a stop string
        choice = {
            "index": i,
            "text": text,
            "logprobs": rendered,
            "finish_reason": reasons[0],
            "stop_reason": reasons[1],
        }
        chunk = {**self.head, "choices": [choice]}
        if self.body.include_usage:
            each = usage(len(self.requests[i].prompt_token_ids), state.tokens)
            chunk["usage"] = each if self.body.usage_in_each_chunk else None
        return chunk


class _Streamed:
    """How far the stream of one prompt is."""

    def __init__(self) -> None:
        self.tokens = 0
        self.echoed = False
        self.logprobs = CompletionLogprobs()
