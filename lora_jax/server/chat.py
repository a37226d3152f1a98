"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..request import Request, StepOutput, TokensPrompt
from .logprobs import chat_logprobs, prompt_logprobs
from .prompts import chat_token_ids
from .protocol import ChatRequest
from .serving import Serving, new_id, now, usage


class Chat:
    """One call. `prepare` makes the engine request; then `full` or `chunks` answers."""

    def __init__(self, serving: Serving, body: ChatRequest):
        self.serving, self.body = serving, body
        self.model, self.lora = serving.catalog.resolve(body.model)
        self.id, self.created = new_id("chatcmpl"), now()
        self.requests: list[Request] = []
        self.tokens = 0

    async def prepare(self) -> None:
        body = self.body
        params = self.serving.params(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None)

        def prompts() -> list[TokensPrompt]:
            ids = chat_token_ids(
                self.serving.engine.tokenizer,
                body.messages,
                body.add_generation_prompt,
                body.continue_final_message,
                body.chat_template_kwargs,
            )
            return [TokensPrompt(prompt_token_ids=ids)]

        self.requests = await self.serving.make_requests(self.id, prompts, params, self.lora, body.asked_max_tokens())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        return usage(len(self.requests[0].prompt_token_ids), completion_tokens)

    def _logprobs(self, token_ids: list[int], logprobs: Any) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(token_ids, logprobs or [], self.body.top_logprobs or 0)

    async def full(self) -> dict[str, Any]:
        results = await self.serving.collect(self.model, self.requests)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": result.text},
                "logprobs": self._logprobs(result.token_ids, result.logprobs),
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
            }
            for i, result in enumerate(results)
        ]
        tokens = sum(len(result.token_ids) for result in results)
        answer = {**self._head("chat.completion"), "choices": choices, "usage": self._usage(tokens)}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs)
        return answer

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        greeted: set[int] = set()
        async with aclosing(self.serving.run(self.model, self.requests)) as outputs:
            async for i, output in outputs:
                if i not in greeted:
                    greeted.add(i)
                    yield self._chunk(i, {"role": "assistant", "content": ""})
                self.tokens += len(output.token_ids)
                if output.text or output.finish_reason or (self.body.logprobs and output.token_ids):
                    yield self._chunk(i, {"content": output.text} if output.text else {}, output)
        if self.body.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage(self.tokens)}

    def _chunk(self, i: int, delta: dict[str, Any], output: StepOutput | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
        if output is not None:
            choice["logprobs"] = self._logprobs(output.token_ids, output.logprobs) if output.token_ids else None
            choice["finish_reason"], choice["stop_reason"] = output.finish_reason, output.stop_reason
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.body.include_usage:
            chunk["usage"] = self._usage(self.tokens) if self.body.usage_in_each_chunk else None
        return chunk
