"""From sampled tokens to what a caller sees: stop conditions, text, logprobs. Host only: never imports jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from .detokenizer import IncrementalDetokenizer
from .errors import LoraJaxError
from .request import FinishReason, Logprobs, Request, StepOutput
from .tokenizer import Tokenizer


@dataclass
class OutputState:
    """What the engine remembers about one request beside the scheduler's fields. given: tokens that outputs told of."""

    request: Request
    tokenizer: Tokenizer | None
    detokenizer: IncrementalDetokenizer | None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs_sent: bool = False
    given: int = 0
    ends: frozenset[int] = field(init=False)  # tokens that may end the request

    def __post_init__(self) -> None:
        params = self.request.params
        eos = frozenset() if params.ignore_eos else self.request.eos_token_ids
        self.ends = eos.union(params.stop_token_ids or ())

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer | None) -> OutputState:
        detokenizer = None
        if tokenizer is not None and request.params.detokenize:
            detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, request.params)
        return cls(request, tokenizer, detokenizer)

    def add_prompt_logprobs(self, position: int, logprobs: Logprobs) -> None:
        """Of the prompt token at `position`; one that is computed again after a preemption is kept once."""
        self.prompt_logprobs.setdefault(position, logprobs)

    def advance(self, token: int, logprobs: Logprobs | None) -> StepOutput:
        """The output of one new token, which is the last of request.token_ids already; says whether it ends the request."""
        request, params = self.request, self.request.params
        self.given += 1
        out = StepOutput(request.request_id, [token], logprobs=None if logprobs is None else [logprobs])
        if params.prompt_logprobs is not None and not self.prompt_logprobs_sent:
            self.prompt_logprobs_sent = True
            n = len(request.prompt_token_ids)
            out.prompt_logprobs = [None, *(self.prompt_logprobs[i] for i in range(1, n))]
        num_output = request.num_output
        may_stop = num_output > params.min_tokens or not params.min_tokens
        reason: FinishReason | None = None
        why: int | str | None = None
        if token in self.ends and may_stop:
            eos = token in request.eos_token_ids and not params.ignore_eos
            reason, why = "stop", None if eos else token
        elif num_output >= request.max_tokens:
            reason = "length"
        hidden = reason == "stop" and not params.include_stop_str_in_output
        if self.detokenizer is not None:
            if not hidden:
                out.text, match = self.detokenizer.append([token], check_stop=num_output >= params.min_tokens)
                if match is not None:
                    reason, why = "stop", match
            if reason is not None and not isinstance(why, str):
                out.text += self.detokenizer.flush()
        out.finish_reason, out.stop_reason = reason, why
        return out


def failed(request_id: str, error: Exception) -> StepOutput:
    """The last output of a request that failed."""
    return StepOutput(request_id, error=error)


def not_finite(request: Request) -> LoraJaxError:
    who = f"adapter {request.adapter.name!r}" if request.adapter is not None else "the base model"
    return LoraJaxError(f"the logits of request {request.request_id!r} ({who}) are not finite; no token was chosen")
