"""Regular expressions out of adapter_config.json, which may be made to run for ever. Host only: never imports jax.

`re` checks what they mean, as PEFT uses it; `regex` runs them, for it can stop and lets other threads go on meanwhile.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import regex

from ..errors import AdapterError

# Of one field. The full names of all modules of the largest models are a quarter of these.
MAX_PATTERNS, MAX_CHARACTERS = 1 << 12, 1 << 18
MAX_REPEATS = 1000  # {n} copies what stands before it n times, and so do those around it
SECONDS = 5.0  # for all matches of one configuration

_PLAIN = re.compile(r"[\w.^$-]*(\\\.[\w.^$-]*)*")  # a mere name: nothing in it can take long
_COUNTED = re.compile(r"\{(\d*),?(\d*)\}")


class Stopwatch:
    """The time that the expressions of one configuration have left."""

    def __init__(self, seconds: float = SECONDS):
        self.left = seconds


class Pattern:
    """One expression of a field, as `template` frames it. Its methods raise AdapterError when the time is up."""

    def __init__(self, field: str, text: str, template: str, stopwatch: Stopwatch):
        self._field, self._text, self._stopwatch = field, text, stopwatch
        self._timed: regex.Pattern[str] | None = None
        try:
            self._plain = re.compile(template.format(text))
            if not _PLAIN.fullmatch(text):
                self._timed = regex.compile(template.format(text))
        except (re.error, regex.error, RecursionError, OverflowError) as e:
            raise AdapterError(
                f"adapter_config.json: {field} holds {text[:80]!r}, no regular expression: {e}"
            ) from None

    def match(self, name: str) -> Any:
        return self._plain.match(name) if self._timed is None else self._run(self._timed.match, name)

    def fullmatch(self, name: str) -> Any:
        return self._plain.fullmatch(name) if self._timed is None else self._run(self._timed.fullmatch, name)

    def _run(self, call: Any, name: str) -> Any:
        start = time.monotonic()
        try:
            return call(name, timeout=max(self._stopwatch.left, 0.001), concurrent=True)
        except TimeoutError:
            raise AdapterError(
                f"adapter_config.json: {self._field} holds {self._text[:80]!r}, which takes too long to compare with the "
                "names of modules: write a simpler one"
            ) from None
        finally:
            self._stopwatch.left -= time.monotonic() - start


def compile_all(field: str, texts: Sequence[str], stopwatch: Stopwatch, template: str = "{}") -> tuple[Pattern, ...]:
    """Each text as `template` frames it. Raises: AdapterError for what is no expression, or a suspiciously large one."""
    size = sum(map(len, texts))
    if len(texts) > MAX_PATTERNS or size > MAX_CHARACTERS:
        raise AdapterError(
            f"adapter_config.json: {field} holds {len(texts)} expressions of {size} characters; at most {MAX_PATTERNS} of "
            f"{MAX_CHARACTERS} can be served"
        )
    for text in texts:
        if math.prod(_copies(low, high) for low, high in _COUNTED.findall(text)) > MAX_REPEATS:
            raise AdapterError(
                f"adapter_config.json: {field} holds {text[:80]!r}, which repeats more than {MAX_REPEATS} times: "
                "write a simpler one"
            )
    return tuple(Pattern(field, text, template, stopwatch) for text in texts)


def _copies(low: str, high: str) -> int:
    return max(int((low or "1")[:9]), int((high or "1")[:9]), 1)
