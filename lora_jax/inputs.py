"""What a caller sends against what this engine can serve. Host only: never imports jax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import RequestError
from .request import Prompt, SamplingParams
from .tokenizer import Tokenizer


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, max_model_len: int, vocab_size: int) -> list[int]:
    """The tokens of a prompt. Raises: RequestError."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("this model has no tokenizer: send prompt_token_ids", param="prompt")
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
        ids = _listed(prompt["prompt_token_ids"])
    else:
        raise RequestError(
            f'a prompt is a string or {{"prompt_token_ids": [...]}}, got {type(prompt).__name__}', param="prompt"
        )
    if len(ids) >= max_model_len:  # before a look at each token
        raise RequestError(
            f"the prompt has {len(ids)} tokens, and max_model_len={max_model_len} leaves no room for an answer",
            param="prompt",
        )
    for t in ids:
        if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab_size:
            raise RequestError(f"prompt token {t!r} is not an integer in [0, {vocab_size})", param="prompt")
    if not ids:
        raise RequestError("the prompt is empty", param="prompt")
    return ids


def _listed(token_ids: Any) -> list[int]:
    if not isinstance(token_ids, Iterable):
        raise RequestError(f"prompt_token_ids must be a list of integers, got {token_ids!r}", param="prompt")
    return list(token_ids)


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, max_logprobs: int, vocab_size: int) -> None:
    """Raises: RequestError naming the field that this engine cannot serve."""
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > max_logprobs:
            raise RequestError(f"{name}={getattr(params, name)} exceeds max_logprobs={max_logprobs}", param=name)
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this model has none", param="stop")
    bad = [t for t in (params.stop_token_ids or ()) if not 0 <= t < vocab_size]
    if bad:
        message = f"stop_token_ids holds {bad[0]}, outside the vocabulary of {vocab_size}"
        raise RequestError(message, param="stop_token_ids")
