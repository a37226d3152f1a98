"""What the server needs of an engine and of a tokenizer: `lora_jax.engine.Engine` fits, and so does a fake in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..request import LoRARequest, Prompt, Request, SamplingParams, StepOutput


class ServedTokenizer(Protocol):
    """Every method may be called from any thread."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


class ServedEngine(Protocol):
    """Every method but `step` may be called from any thread; `step` from the worker's thread alone."""

    @property
    def tokenizer(self) -> ServedTokenizer | None: ...
    @property
    def step_table(self) -> Any: ...  # report() -> list of dictionaries, ready for JSON
    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def defaults(self) -> Any: ...  # sampling defaults as attributes; None where the model says nothing
    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
    ) -> Request: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_unfinished(self) -> bool: ...
    def step(self) -> list[StepOutput]: ...
    def drain(self) -> None: ...  # reads what was begun for requests that have ended
    def load_lora(self, name: str, path: str, *, replace: bool = False) -> Any: ...
    def unload_lora(self, name: str) -> None: ...
    def list_loras(self) -> list[Any]: ...  # LoadReport: has name and path
    def stats(self) -> dict[str, Any]: ...
