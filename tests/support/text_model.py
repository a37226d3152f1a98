"""A tiny checkpoint with a tokenizer, and what transformers (and PEFT) say that it writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support import tiny, tokenizer_kinds

TOLERANCE = 1e-3  # logits
WORDS = "Hello world how are you the cat sat on mat naïve café 日本語 привет 😀 and so it goes".split()


@dataclass
class TextModel:
    """oracles: None is the base, the others are adapters by name. Continuations are greedy and `length` tokens long."""

    folder: Path
    tokenizer: Any
    oracles: dict[str | None, tiny.Oracle]
    length: int = 12
    _known: dict[Any, tuple[list[int], float]] = field(default_factory=dict)

    @property
    def oracle(self) -> tiny.Oracle:
        return self.oracles[None]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def decode(self, ids: list[int], skip: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    def chat_ids(self, messages: list[dict], add: bool = True) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def greedy(self, prompt: str | list[int], name: str | None = None) -> tuple[list[int], float]:
        """The continuation, and the smallest margin on the way."""
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        key = (name, *ids)
        if key not in self._known:
            self._known[key] = self.oracles[name].greedy(ids, self.length)
        return self._known[key]

    def prompts(self, fits: Callable[[list[int]], Any] = lambda tokens: True) -> Iterator[str]:
        """Prompts whose continuations are certain under every oracle, and whose base continuation is as wanted."""
        for a, b in itertools.permutations(WORDS, 2):
            text = f"{a} {b}"
            if fits(self.greedy(text)[0]) and all(self.greedy(text, n)[1] > 2 * TOLERANCE for n in self.oracles):
                yield text


def save(architecture: str, folder: Path) -> Any:
    """One of tiny.ARCHITECTURES with a byte-level tokenizer of as many tokens as the model; returns the tokenizer."""
    tokenizer_kinds.save("byte_level", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    family, options = tiny.ARCHITECTURES[architecture]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.ARCHITECTURES, "text", (family, {**options, "vocab_size": len(tokenizer)}))
        tiny.save_base("text", folder)
    return tokenizer
