"""From messages to a prompt: what the chat template gets, and what is refused before it."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from .engine_api import ServedTokenizer

# Beside role and content; the template sees these as they are.
_PASSED = ("name", "reasoning", "reasoning_content")


def chat_token_ids(
    tokenizer: ServedTokenizer | None,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: dict[str, Any] | None,
) -> list[int]:
    """The prompt's token ids, special tokens included. Raises RequestError naming what cannot be served."""
    if tokenizer is None:
        raise RequestError("this model has no tokenizer, so no chat template: use /v1/completions", "messages")
    return tokenizer.apply_chat_template(
        [_message(i, message) for i, message in enumerate(messages)],
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        chat_template_kwargs=kwargs,
    )


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{i}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}: role must be a non-empty string", "messages")
    if role in ("tool", "function"):
        raise RequestError(f"{where}: the role {role!r} is not supported: this server has no tools", "messages")
    out: dict[str, Any] = {"role": role, "content": _content(where, message.get("content"), role)}
    for name, value in message.items():
        if name in _PASSED and value is not None:
            if not isinstance(value, str):
                raise RequestError(f"{where}: {name} must be a string", "messages")
            out[name] = value
        elif name not in out and value not in (None, [], "", {}):
            raise RequestError(f"{where}: {name[:100]} is not supported by this server: leave it out", "messages")
    return out


def _content(where: str, content: Any, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise RequestError(f"{where}: content must be a string or a list of text parts", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = repr(kind)[:100] if kind is not None else "without a type"
            raise RequestError(f"{where}: a content part {shown} is not supported: only 'text' is", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}: a text part needs a string in its field text", "messages")
        texts.append(part["text"])
    return "\n".join(texts)
