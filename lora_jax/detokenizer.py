"""Token ids to text as they come, and the search for stop strings across them. Host only."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .request import SamplingParams
from .tokenizer import Tokenizer

BROKEN = "\ufffd"  # what decoders write for bytes that are not UTF-8, also for a character that is not complete yet
_TAIL = 64  # prompt tokens looked at
_CONTEXT = range(4, 13)  # how many of them to decode with
_TRIM = 16  # pending tokens above which a place to cut them is looked for
_SPAN = 3  # tokens that may lie inside one character


class _TextStream:
    """Text of a growing list of ids: the pending ids are decoded behind a few finished ones, so that spaces come right.

    The text of all calls together is what decode(prompt + output) adds to decode(prompt). One exception: where single bytes
    are tokens of their own (byte fallback) and some are broken, decode spoils the whole characters beside them as well;
    here those stay.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # for tokens that are single bytes
        self._in_bytes = False
        self._pending: list[int] = []
        self._given = 0  # characters of the pending text that were returned already
        tail = [t for t in prompt_ids[-_TAIL:] if not tokenizer.is_silent(t, skip_special_tokens)]
        text = self._start(tail)
        # A prompt may end inside a character, which the output then completes.
        self._context_text = text[: len(text) - text.endswith(BROKEN)]
        for id in tail:
            self._take_byte(tokenizer.byte_of(id))

    def append(self, id: int) -> str:
        """The text that is certain after one more id."""
        if self._tokenizer.is_silent(id, self._skip):
            return ""
        byte = self._tokenizer.byte_of(id)
        if byte is not None:
            return self._end_pending() + self._take_byte(byte)
        before = self._take_byte(None)
        self._pending.append(id)
        text = self._text_of(self._pending)
        new = text[self._given : len(text) - text.endswith(BROKEN)]
        self._given += len(new)
        if text and not text.endswith(BROKEN):
            self._move_on(len(self._pending))
        elif len(self._pending) % _TRIM == 0:
            new += self._trim(text)
        return before + new

    def flush(self) -> str:
        """What was held back as possibly incomplete."""
        return self._end_pending() + self._take_byte(None)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _start(self, tail: list[int]) -> str:
        """Sets the context from the end of a prompt; from a whole character on, if there is one. Returns its text."""
        text = ""
        for n in _CONTEXT:
            self._context = tail[-n:]
            text = self._decode(self._context)
            if BROKEN not in text:
                break
        return text

    def _take_byte(self, byte: int | None) -> str:
        """Goes on with, or for None ends, a run of tokens that are single bytes."""
        if byte is not None:
            self._in_bytes = True
            return self._utf8.decode(bytes([byte]))
        if not self._in_bytes:
            return ""
        self._in_bytes = False
        self._context = list(self._tokenizer.anchor)  # any text would do: what follows is not at the beginning
        self._context_text = self._decode(self._context)
        return self._utf8.decode(b"", final=True)

    def _end_pending(self) -> str:
        if not self._pending:
            return ""
        text = self._text_of(self._pending)[self._given :]
        self._move_on(len(self._pending))
        return text

    def _text_of(self, ids: list[int]) -> str:
        """What ids that follow the context add to its text."""
        return self._decode(self._context + ids)[len(self._context_text) :]

    def _move_on(self, n: int) -> None:
        self._context, self._pending, self._given = self._pending[:n], self._pending[n:], 0
        self._context_text = self._decode(self._context)

    def _trim(self, text: str) -> str:
        """Cuts long pending ids at a place, near their end, where no character can span the cut. Returns text now certain.

        Such a place shows: both sides decoded alone are what they are together.
        """
        for n in range(len(self._pending) - 1, len(self._pending) - 1 - _SPAN, -1):
            left, given = self._text_of(self._pending[:n]), self._given
            if left + self._decode(self._pending[n:]) == text:
                self._move_on(n)
                self._given = max(0, given - len(left))
                return left[given:]
        return ""


class IncrementalDetokenizer:
    """Text of one request's output, piece by piece, ended by its stop strings.

    prompt_ids: only their end is looked at, for the space before the first word. What streams is never taken back: text that
    may be the beginning of a stop string, or a part of a character, waits. The cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams):
        self._stream = _TextStream(tokenizer, prompt_ids, params.skip_special_tokens)
        self._stops = tuple(params.stop or ())
        self._include = params.include_stop_str_in_output
        self._held = ""
        self._stopped = False

    def append(self, token_ids: Sequence[int], *, check_stop: bool = True) -> tuple[str, str | None]:
        """New text and the stop string that ended it, if any; whatever follows is ignored.

        token_ids: without the end token itself (end of text, stop_token_ids) unless its text is wanted. check_stop: False
        while min_tokens is not reached: stop strings that are complete by then don't count.
        """
        delta = ""
        for id in token_ids:
            if self._stopped:
                break
            text, stop = self._take(self._stream.append(id), check_stop)
            delta += text
            if stop is not None:
                return delta, stop
        return delta, None

    def flush(self) -> str:
        """The text still held back, once no more tokens come."""
        if self._stopped:
            return ""
        self._stopped = True
        return self._held + self._stream.flush()

    def _take(self, new: str, check_stop: bool) -> tuple[str, str | None]:
        old, text = len(self._held), self._held + new
        found = self._find(text, old) if check_stop and new else None
        if found is not None:
            end, stop = found
            self._held, self._stopped = "", True
            return text[:end] if self._include else text[: end - len(stop)], stop
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        """The stop string that is complete first, and where it ends, among those that end in text[old:]."""
        found = []
        for stop in self._stops:
            at = text.find(stop, max(0, old - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), -len(stop), stop))
        return (min(found)[0], min(found)[2]) if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with, without being it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
