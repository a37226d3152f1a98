"""An engine without a model, whose answers can be computed by hand.

Tokens are Unicode code points. The answer repeats the prompt for ever, each character moved up by the adapter's shift
(base 0, the adapters of ADAPTERS as listed): `answer("abc", 5, shift=1)` is "bcdbc". One token a request and step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lora_jax.errors import AdapterError, AdapterNotFoundError, RequestError
from lora_jax.models.generation import GenerationDefaults
from lora_jax.request import Logprob, Logprobs, LoRARequest, Prompt, Request, SamplingParams, StepOutput

ADAPTERS = {"up1": 1, "up2": 2, "org/up3": 3}
CHOSEN = -0.25  # logprob of every generated token


def answer(prompt: str, tokens: int, shift: int = 0) -> str:
    return "".join(chr(ord(prompt[i % len(prompt)]) + shift) for i in range(tokens))


def candidates(token: int, k: int) -> Logprobs:
    """The token first, then the k best: itself and its successors, each 1 less likely."""
    out = {token: Logprob(CHOSEN, 1, chr(token))}
    for i in range(1, k):
        out[token + i] = Logprob(CHOSEN - i, i + 1, chr(token + i))
    return out


class FakeTokenizer:
    has_template = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(t) for t in ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if not self.has_template:
            raise RequestError("fake has no chat template", "messages")
        if add_generation_prompt and continue_final_message:
            raise RequestError("continue_final_message excludes add_generation_prompt", "continue_final_message")
        if "tools" in (chat_template_kwargs or {}):
            raise RequestError("chat_template_kwargs may not set tools", "chat_template_kwargs")
        end = (chat_template_kwargs or {}).get("end", "")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + end
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


class FakeEngine:
    """Knobs for tests: `gate` (cleared: steps wait), `delay` a step, `crash` (raised by the next step), `hold` (text
    comes with every second token only); a prompt that starts with "!" fails in the engine."""

    def __init__(self, *, max_model_len: int = 4096, max_num_seqs: int = 64, adapters: dict[str, int] | None = None):
        self.model_name, self.max_model_len, self.max_logprobs = "/models/fake", max_model_len, 20
        self.max_num_seqs, self.given = max_num_seqs, dict(ADAPTERS if adapters is None else adapters)
        self.step_table = SimpleNamespace(report=lambda: [{"key": "decode[1]", "hits": self.steps}])
        self.gate = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[str, Request] = {}
        self._aborted: deque[str] = deque()
        self._unsent: dict[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Everything as at the start, for the next test."""
        assert not self._open, "a test left requests behind"
        self._aborted.clear()
        self._unsent.clear()
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.defaults = GenerationDefaults()
        self.delay, self.hold = 0.0, False
        self.gate.set()
        self.crash: BaseException | None = None
        self.shifts = dict(self.given)
        self.loras = {name: SimpleNamespace(name=name, path=f"/adapters/{name}") for name in self.shifts}
        self.steps, self.polls = 0, 0
        self.aborts: list[str] = []
        self.added: list[Request] = []

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
    ) -> Request:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            assert self.tokenizer is not None
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt["prompt_token_ids"])
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        if any(not 0 <= t < 0x110000 for t in ids):
            raise RequestError("a prompt token is outside the vocabulary", param="prompt")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise RequestError(f"the prompt has {len(ids)} tokens; max_model_len={self.max_model_len}", param="prompt")
        adapter = None
        if lora_request is not None:
            if lora_request.lora_name not in self.shifts:
                raise AdapterNotFoundError(lora_request.lora_name, list(self.shifts))
            adapter = self.shifts[lora_request.lora_name]
        request = Request(request_id or "r", ids, params, adapter, prompt=text, lora_request=lora_request)
        request.max_tokens = min(params.max_tokens or room, room)
        return request

    def add_request(self, request: Request) -> None:
        with self._lock:
            self._open[request.request_id] = request
            self.added.append(request)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborts.append(request_id)
            self._aborted.append(request_id)

    def has_unfinished(self) -> bool:
        with self._lock:
            self.polls += 1
            return bool(self._open)

    def drain(self) -> None:
        pass

    def step(self) -> list[StepOutput]:
        self.gate.wait()
        time.sleep(self.delay)
        if self.crash is not None:
            raise self.crash
        with self._lock:
            self.steps += 1
            outputs = []
            while self._aborted:
                request = self._open.pop(self._aborted.popleft(), None)
                if request is not None:
                    outputs.append(StepOutput(request.request_id, finish_reason="abort"))
            for request in list(self._open.values())[: self.max_num_seqs]:
                outputs.append(self._advance(request))
                if outputs[-1].finished:
                    del self._open[request.request_id]
                    self._unsent.pop(request.request_id, None)
            return outputs

    def _advance(self, request: Request) -> StepOutput:
        params, n = request.params, request.num_output
        if request.prompt_token_ids[0] == ord("!"):
            return StepOutput(request.request_id, error=RequestError("the engine refused this one"))
        token = request.prompt_token_ids[n % len(request.prompt_token_ids)] + (request.adapter or 0)
        request.token_ids.append(token)
        out = StepOutput(request.request_id, [token])
        if params.logprobs is not None:
            out.logprobs = [candidates(token, params.logprobs)]
        if params.prompt_logprobs is not None and n == 0:
            k = params.prompt_logprobs
            out.prompt_logprobs = [None, *(candidates(t, k) for t in request.prompt_token_ids[1:])]
        text = self._unsent.pop(request.request_id, "") + chr(token)
        if token in (params.stop_token_ids or ()) or chr(token) in (params.stop or ()):
            out.finish_reason = "stop"
            out.stop_reason = token if token in (params.stop_token_ids or ()) else chr(token)
            text = text[:-1]
        elif n + 1 >= request.max_tokens:
            out.finish_reason = "length"
        if self.hold and n % 2 == 0 and out.finish_reason is None:
            self._unsent[request.request_id], text = text, ""
        out.text = text
        return out

    def load_lora(self, name: str, path: str, *, replace: bool = False) -> Any:
        if "broken" in path:
            raise AdapterError(f"the adapter in {path} is broken")
        with self._lock:
            self.shifts[name] = 7
            self.loras[name] = SimpleNamespace(name=name, path=path)
            return self.loras[name]

    def unload_lora(self, name: str) -> None:
        with self._lock:
            if name not in self.loras:
                raise AdapterNotFoundError(name, list(self.loras))
            del self.loras[name], self.shifts[name]

    def list_loras(self) -> list[Any]:
        with self._lock:
            return list(self.loras.values())

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {"running": len(self._open), "waiting": 0, "free_pages": 99, "compilations_after_warmup": 0}
