"""Bodies of the API's requests. Numbers are strict: "16" and true are no integers.

A field that is not declared here and not harmless is refused by name, so that nothing that would change the answer is
dropped in silence. null, and values that ask for nothing, are always fine.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..errors import RequestError
from ..request import SamplingParams

MAX_PROMPTS = 128
MAX_STOPS = 64
MAX_MESSAGES = 4096

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = list[Int32]
Stops = Annotated[list[str], Field(max_length=MAX_STOPS)]

# Known fields that change nothing about the text.
HARMLESS = frozenset(
    "user metadata store service_tier parallel_tool_calls safety_identifier prompt_cache_key prompt_cache_retention"
    " request_id priority cache_salt".split()
)

# Known fields that are not supported -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "modalities": ([], ["text"]),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "include_reasoning": (True,),
    "add_special_tokens": (False,),  # of chat: the template writes them
    **dict.fromkeys(
        "audio prediction web_search_options reasoning_effort verbosity chat_template structured_outputs guided_json"
        " guided_regex guided_choice guided_grammar structural_tag guided_decoding_backend logits_processors"
        " truncate_prompt_tokens prompt_embeds kv_transfer_params vllm_xargs thinking_token_budget".split(),
        (),
    ),
}


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @model_validator(mode="after")
    def _no_unknown_fields(self) -> Any:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in HARMLESS:
                continue
            if name in UNSUPPORTED:
                if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
                    raise RequestError(f"{name} is not supported by this server: leave it out", name)
                continue
            close = difflib.get_close_matches(name, type(self).model_fields, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise RequestError(f"{name[:100]} is not a field of this request{hint}", name[:100])
        return self


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """What completions and chat have in common. null means the default, as does leaving it out."""

    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    max_tokens: Int32 | None = None
    prompt_logprobs: Int32 | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    @field_validator("stop", mode="wrap")
    @classmethod
    def _plain_stop_error(cls, value: Any, handler: Any) -> Any:
        return _one_error(value, handler, f"must be a string or a list of at most {MAX_STOPS} strings")

    @model_validator(mode="after")
    def _stream_fields(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not available with stream=true", "prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_each_chunk(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    def sampling_params(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """`defaults` (of the model) fill what the request leaves open. Raises RequestError naming the field."""
        names = (
            "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop"
            " stop_token_ids ignore_eos min_tokens prompt_logprobs skip_special_tokens include_stop_str_in_output"
        ).split()
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given["max_tokens"] = self.asked_max_tokens()
        if given["max_tokens"] is None:  # completions have a default of their own, chat takes the model's
            given["max_tokens"] = self.DEFAULT_MAX_TOKENS or defaults.get("max_tokens")
        return SamplingParams(**{**defaults, **given, **more})


class CompletionRequest(SamplingBody):
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Int32 | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _plain_prompt_error(cls, value: Any, handler: Any) -> Any:
        return _one_error(
            value, handler, "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _prompt_count(self) -> Any:
        if not self.prompt and not isinstance(self.prompt, str):
            raise RequestError("prompt is an empty list", "prompt")
        if len(self.prompts()) > MAX_PROMPTS:
            raise RequestError(
                f"prompt holds {len(self.prompts())} prompts; at most {MAX_PROMPTS} fit in one request", "prompt"
            )
        return self


class ChatRequest(SamplingBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Any:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        return self

    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Body):
    """Either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class LoadLoRARequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadLoRARequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_int_id: int | None = None  # accepted for vLLM's clients; the name alone counts


def _one_error(value: Any, handler: Any, text: str) -> Any:
    """A union's failure as one sentence instead of one error an alternative."""
    try:
        return handler(value)
    except ValueError:
        raise ValueError(text) from None
