"""The nouns of a request: what a caller asks for and what comes back. Host only: never imports jax.

Names and defaults follow vLLM's Python API, so that code written for it runs unchanged where the feature exists here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

from .errors import RequestError

FinishReason = Literal["stop", "length", "abort"]
MAX_N = 128  # continuations of one prompt, as in the OpenAI API


class TokensPrompt(TypedDict):
    """A prompt that is already tokenized."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt


def _number(name: str, value: Any, low: float, high: float = math.inf, *, integer: bool = False) -> None:
    kind = (int,) if integer else (int, float)
    good = isinstance(value, kind) and not isinstance(value, bool)
    huge = isinstance(value, int) and abs(value) >= 1 << 64  # may be no float, and too long to print
    if not good or huge or not math.isfinite(value) or not low <= value <= high:
        what = "an integer" if integer else "a number"
        span = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f">= {low:g}"
        given = "a huge integer" if huge else repr(value)
        raise RequestError(f"{name} must be {what} {span}, got {given}", param=name)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if value is not None and not isinstance(value, Sequence | Set):
        raise RequestError(f"{name} must be a list, got {value!r}", param=name)
    return tuple(value or ())


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Fields, meanings and defaults are those of vLLM's `SamplingParams`.

    n: continuations of each prompt, 1 to 128. They share what is computed of the prompt, where whole pages of it are; with a seed,
    the i-th draws as a request with seed + i does.
    temperature: 0 means greedy. top_p in (0, 1]; top_k 0 or -1 means all; min_p in [0, 1].
    repetition_penalty > 0 (1 = off) over prompt and output; presence/frequency_penalty in [-2, 2] over the output.
    seed: makes the request's draws independent of everything else in the batch.
    stop: strings that end the text (left out of it unless include_stop_str_in_output); stop_token_ids: ids that end it.
    min_tokens: neither end tokens nor stop strings count before. logprobs / prompt_logprobs: how many top tokens to report.

    Raises: RequestError naming the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _number("n", self.n, 1, MAX_N, integer=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be > 0, got 0", param="repetition_penalty")
        _number("temperature", self.temperature, 0)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p must be in (0, 1], got 0", param="top_p")
        _number("top_k", self.top_k, -1, integer=True)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _number("seed", self.seed, -(2**63), 2**63 - 1, integer=True)
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, 1, integer=True)
        _number("min_tokens", self.min_tokens, 0, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}", param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), 0, integer=True)
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if any(not isinstance(s, str) or not s for s in stop):
            raise RequestError(f"stop must hold non-empty strings, got {self.stop!r}", param="stop")
        ids = _items("stop_token_ids", self.stop_token_ids)
        if any(isinstance(t, bool) or not isinstance(t, int) for t in ids):
            raise RequestError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}", param="stop_token_ids")
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a prompt uses. `lora_name` and the content of `lora_path` are the identity.

    lora_int_id is accepted so that vLLM code runs, and is never used. lora_path may be left out for a loaded adapter.
    """

    lora_name: str
    lora_int_id: int | None = None
    lora_path: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name must be a non-empty string, got {self.lora_name!r}", param="lora_name")
        if self.lora_path is not None and not isinstance(self.lora_path, str | os.PathLike):
            raise RequestError(f"lora_path must be a string, got {self.lora_path!r}", param="lora_path")


@dataclass(frozen=True)
class Logprob:
    """One candidate token: natural log-probability under the raw logits, 1-based rank in the vocabulary, text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """What one prompt gave. prompt_logprobs[0] is None: nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | None = None


@dataclass
class StepOutput:
    """What one engine step added to one request. `text` is the new text only; `logprobs` are those of `token_ids`.

    prompt_logprobs comes once, with the first output of the request. error is set when the request failed.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class Request:
    """One sequence inside the engine. Owned by the engine thread after `Engine.add_request`.

    token_ids holds prompt then output. num_computed counts the tokens whose keys and values lie in pages, or will once the
    steps in flight have run; pending counts the tokens that those steps choose.
    adapter is the loaded adapter itself, never its name: a reload under the same name leaves this request alone.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: Any = None
    prompt: str | None = None
    lora_request: LoRARequest | None = None
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = field(default_factory=time.monotonic)
    # engine state
    token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list)  # of the pages of token_ids: see kv_pages
    num_computed: int = 0
    pending: int = 0
    slot: int = -1  # device slot of the adapter while scheduled, -1: base
    row: int = -1  # row of the per-sequence sampling state while scheduled
    max_tokens: int = 0  # params.max_tokens cut to what max_model_len leaves
    index: int = 0  # which of its prompt's continuations
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_token_time: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_sampled(self) -> int:
        """Output tokens, pending ones too."""
        return len(self.token_ids) - len(self.prompt_token_ids) + self.pending

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]


def continuations(request: Request) -> list[Request]:
    """A request for each of the params.n continuations of one that was made and not added: itself where that is one."""
    params, n = request.params, request.params.n
    if n == 1:
        return [request]
    out = []
    for i in range(n):
        seed = None if params.seed is None else params.seed + i
        own = dict(request_id=f"{i}_{request.request_id}", params=replace(params, n=1, seed=_wrapped(seed)), index=i)
        same = "prompt_token_ids adapter prompt lora_request eos_token_ids arrival max_tokens".split()
        out.append(Request(**own, **{name: getattr(request, name) for name in same}))
    return out


def _wrapped(seed: int | None) -> int | None:
    """Within 64 bits, of which alone the draws follow."""
    return seed if seed is None or seed < 2**63 else seed - 2**64
