"""Text to token ids and back, through the tokenizer that a checkpoint brings. Host only; transformers comes in on use.

The work is done by the immutable backend of a fast tokenizer, so that threads need no lock and the engine's thread never
waits for a long prompt that another one encodes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from .errors import ModelLoadError, RequestError

Message = Mapping[str, Any]
_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


class Tokenizer:
    """A tokenizer of Hugging Face's kind. Every method may be called from any thread.

    hf: the transformers tokenizer, for its special tokens and chat template. vocab_size: ids, added tokens included.
    eos_token_id: None when the tokenizer names none. anchor: id of a plain letter, for what must not be decoded as the
    beginning of a text.
    """

    def __init__(self, hf: Any, name: str):
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            kind = type(hf).__name__
            raise ModelLoadError(
                f"the tokenizer of {name} ({kind}) has no fast version: convert it to a tokenizer.json"
            )
        # tokenizer.json may ask for these; a prompt must be neither cut nor filled up in silence.
        backend.no_truncation()
        backend.no_padding()
        self.hf, self.name, self._backend = hf, name, backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_id: int | None = hf.eos_token_id
        self._special = frozenset(id for id, t in backend.get_added_tokens_decoder().items() if t.special)
        self._template_names = frozenset(inspect.signature(hf.apply_chat_template).parameters) | {"messages"}
        self.anchor = tuple(backend.encode("a", add_special_tokens=False).ids[-1:])
        self._bytes = _byte_tokens(backend)
        self.token_text: Callable[[int], str] = lru_cache(maxsize=1 << 16)(self._token_text)

    @classmethod
    def load(cls, path_or_id: str, revision: str | None = None) -> Tokenizer:
        """From a directory or a hub id. Raises: ModelLoadError when there is none, or none that can be used."""
        with _quiet():
            from transformers import AutoTokenizer

            try:
                hf = AutoTokenizer.from_pretrained(path_or_id, revision=revision, trust_remote_code=False)
            except Exception as error:  # a broken tokenizer.json raises a bare Exception
                what = "is it the right directory or hub id, and does it hold a tokenizer.json?"
                raise ModelLoadError(f"no usable tokenizer in {path_or_id!r}: {what} ({error})") from error
        return cls(hf, str(path_or_id))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that this tokenizer adds to a prompt by default.

        Raises: RequestError for text with an unpaired surrogate.
        """
        try:
            # Of one text: `encode` would hold Python's lock, and with it every other thread, for seconds over a long one.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeError) as error:  # half a surrogate pair, which JSON can carry
            raise RequestError(f"the text is not valid Unicode: {error}", "prompt") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without clean-up of spaces; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_silent(self, id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` ignores the id: a special token that is skipped, or an id that the vocabulary lacks."""
        return (skip_special_tokens and id in self._special) or self._backend.id_to_token(id) is None

    def byte_of(self, id: int) -> int | None:
        """The byte that a token of byte fallback, such as <0x0A>, stands for."""
        return self._bytes.get(id)

    def _token_text(self, id: int) -> str:
        """Text of one token as it reads inside a text: with its leading space. Part of a character is U+FFFD."""
        before = self.decode(self.anchor, False)
        text = self.decode([*self.anchor, id], False)
        return text[len(before) :] if text.startswith(before) else self.decode([id], False)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, by the model's template alone: it writes the special tokens, so none are added.

        messages: role and content each; content is a string, or a list of {"type": "text", "text": ...} parts, which
        are joined by line breaks. Raises: RequestError naming messages[i], or with what the template objected to.
        """
        if not self.hf.chat_template:
            raise RequestError(f"{self.name} has no chat template: use completions with a plain prompt", "messages")
        if add_generation_prompt and continue_final_message:
            message = "continue_final_message and add_generation_prompt exclude each other: switch one off"
            raise RequestError(message, "continue_final_message")
        extra = dict(chat_template_kwargs or {})
        if reserved := sorted(self._template_names & extra.keys()):
            raise RequestError(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")
        conversation = _conversation(messages)
        try:
            text = self.hf.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **extra,
            )
        except ImportError:  # jinja2 is missing: the installation's fault
            raise
        except Exception as error:  # a template is a program: it may raise anything, on purpose or over odd messages
            raise RequestError(f"the chat template of {self.name} refused the messages: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)


def _byte_tokens(backend: Any) -> dict[int, int]:
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    fallback = ids[0x41] is not None and backend.decode([ids[0x41]]) == "A"  # else they are mere text
    return {id: byte for byte, id in enumerate(ids) if id is not None} if fallback else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice to install torch, which nothing here needs."""
    before = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = before


def _conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages must be a list with at least one message, got {messages!r}", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {message!r}", where)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{where}.role must be a non-empty string, got {message.get('role')!r}", f"{where}.role")
    return {**message, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} must be a string or a list of text parts, got {content!r}", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        what = f"parts of type {kind!r}" if isinstance(kind, str) else f"{part!r}"
        raise RequestError(f"{where}: {what} can't be served, only parts of type 'text'", where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be a string, got {part.get('text')!r}", f"{where}.text")
    return part["text"]
