"""Logprobs in the forms of the API. JSON has no infinity, so -inf becomes MIN_LOGPROB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..request import Logprob, Logprobs

MIN_LOGPROB = -9999.0


def _value(entry: Logprob) -> float:
    return max(MIN_LOGPROB, entry.logprob)  # in this order NaN, which JSON lacks too, gives MIN_LOGPROB


def _text(token: int, entry: Logprob | None) -> str:
    return entry.decoded_token if entry and entry.decoded_token is not None else f"token_id:{token}"


class CompletionLogprobs:
    """OpenAI's older form: parallel lists, and offsets into the choice's text."""

    def __init__(self) -> None:
        self.offset = 0

    def render(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, list[Any]]:
        """Continues where the last call ended. A prompt's first token has None."""
        out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, candidates in zip(token_ids, logprobs, strict=True):
            chosen = candidates[token] if candidates else None
            text = _text(token, chosen)
            out["text_offset"].append(self.offset)
            out["tokens"].append(text)
            out["token_logprobs"].append(_value(chosen) if chosen else None)
            out["top_logprobs"].append(_by_text(candidates) if candidates else None)
            self.offset += len(text)
        return out


def _by_text(candidates: Logprobs) -> dict[str, float]:
    """Tokens of one text (parts of a character, say) share a key: the likeliest counts."""
    out: dict[str, float] = {}
    for token, entry in candidates.items():
        key = _text(token, entry)
        out[key] = max(_value(entry), out.get(key, MIN_LOGPROB))
    return out


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[Logprobs], top: int) -> dict[str, Any]:
    """OpenAI's newer form; at most `top` alternatives, likeliest first."""
    content = []
    for token, candidates in zip(token_ids, logprobs, strict=True):
        best = sorted(candidates.items(), key=lambda item: -item[1].logprob)[:top]
        entry = _chat_entry(token, candidates[token])
        content.append({**entry, "top_logprobs": [_chat_entry(t, e) for t, e in best]})
    return {"content": content, "refusal": None}


def _chat_entry(token: int, entry: Logprob) -> dict[str, Any]:
    text = _text(token, entry)
    return {"token": text, "logprob": _value(entry), "bytes": list(text.encode("utf-8", "replace"))}


def prompt_logprobs(logprobs: Sequence[Logprobs | None] | None) -> list[Any] | None:
    """vLLM's extension: by token id; None for the first token."""
    if logprobs is None:
        return None
    return [
        candidates
        and {
            str(token): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in candidates.items()
        }
        for candidates in logprobs
    ]
