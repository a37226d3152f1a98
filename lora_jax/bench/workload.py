"""Lists of requests for benchmarks: lengths, prompts, who gets which adapter. Deterministic by seed. Host only."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .rounds import positive

ASSIGNMENTS = ("distinct", "uniform", "zipf", "none")
RANGE_RATIO, SHARE = 0.0, 0.7  # defaults
MAX_TOKENS, MAX_ADAPTER = 100_000_000, 99_999  # of a request; the highest number of one: all below are made


@dataclass(frozen=True)
class Item:
    """One request. adapter: an index, None is the base model."""

    prompt_token_ids: tuple[int, ...]
    output_len: int
    adapter: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_len


def add_length_arguments(
    group: argparse._ArgumentGroup, num_prompts: int | None, input_len: int, output_len: int, shown: str = "%(default)s"
) -> None:
    """Options named as in vLLM's benchmarks. num_prompts: the default, None where the caller fills in what `shown` tells."""
    text = f"requests (default: {shown})"
    group.add_argument("--num-prompts", type=positive, default=num_prompts, metavar="N", help=text)
    group.add_argument("--input-len", type=positive, default=input_len, metavar="N", help="tokens a prompt")
    group.add_argument("--output-len", type=positive, default=output_len, metavar="N", help="tokens to generate")
    group.add_argument(
        "--random-range-ratio",
        type=range_ratio,
        default=RANGE_RATIO,
        metavar="R",
        help="both lengths are uniform in [len * (1 - R), len * (1 + R)], 0 <= R < 1 (default: %(default)s)",
    )


def add_assignment_arguments(group: argparse._ArgumentGroup) -> None:
    """Who gets which adapter."""
    group.add_argument(
        "--lora-assignment",
        choices=ASSIGNMENTS,
        help="distinct: one adapter after the other; uniform: any; zipf: adapter k with weight 1 / (k + 1); none: all "
        "requests go to the base model (default: uniform where there are adapters)",
    )
    text = f"share of the requests that get an adapter (default: {SHARE} where there are adapters)"
    group.add_argument("--lora-share", type=share, metavar="X", help=text)


def range_ratio(text: str) -> float:
    """argparse's type=: a number in [0, 1)."""
    value = _not_negative(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be below 1, got {text}")
    return value


def share(text: str) -> float:
    """argparse's type=: a number in [0, 1]."""
    value = _not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1], got {text}")
    return value


def positive_number(text: str) -> float:
    """argparse's type=: a number above 0, inf included."""
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0, got 0")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:  # also nan
        raise argparse.ArgumentTypeError(f"must be >= 0, got {text}")
    return value


def random_lengths(mean: int, ratio: float, number: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [number], uniform in [mean * (1 - ratio), mean * (1 + ratio)], at least 1."""
    # rounded first: 100 * 1.1 is a little more than 110
    low, high = (round(mean * (1 + sign * ratio), 6) for sign in (-1, 1))
    return rng.integers(max(math.floor(low), 1), math.ceil(high) + 1, number)


def assign_adapters(
    assignment: str, number: int, num_adapters: int, portion: float, rng: np.random.Generator
) -> list[int | None]:
    """An adapter's index or None for each of `number` requests; each gets an adapter with probability `portion`."""
    coin = rng.random(number)
    if assignment == "none":
        return [None] * number
    chosen = coin < portion
    if assignment == "distinct":
        who = (np.cumsum(chosen) - 1) % num_adapters
    elif assignment == "uniform":
        who = rng.integers(0, num_adapters, number)
    elif assignment == "zipf":
        weights = 1.0 / np.arange(1, num_adapters + 1)
        who = rng.choice(num_adapters, number, p=weights / weights.sum())
    else:
        raise ValueError(f"assignment must be one of {ASSIGNMENTS}, got {assignment!r}")
    return [int(w) if c else None for w, c in zip(who, chosen, strict=True)]


def assignment_of(options: argparse.Namespace, num_adapters: int) -> str:
    """The assignment asked for, or its default.

    Raises: ConfigError when adapters are needed and there are none, or a share of them is given and nobody gets one.
    """
    assignment = options.lora_assignment or ("uniform" if num_adapters else "none")
    named, portion = assignment != "none", options.lora_share
    for flag, asks in ((f"--lora-assignment {assignment}", named), (f"--lora-share {portion}", portion is not None)):
        if asks and not num_adapters:
            raise ConfigError(f"{flag} needs adapters, and none is named or asked for")
    if portion is not None and not named:
        raise ConfigError(f"--lora-share {portion} and --lora-assignment none exclude each other")
    return assignment


def share_of(options: argparse.Namespace, num_adapters: int) -> float:
    """The share of the requests that get an adapter. Raises as `assignment_of`."""
    none = assignment_of(options, num_adapters) == "none"
    return 0.0 if none else SHARE if options.lora_share is None else options.lora_share


def random_items(options: argparse.Namespace, number: int, num_adapters: int, vocab: int, seed: int) -> list[Item]:
    """`number` requests from the options of the two functions above; token ids uniform in [0, vocab)."""
    rng, tokens = (np.random.default_rng([seed, stream]) for stream in (0, 1))  # two: lengths do not depend on vocab
    inputs = random_lengths(options.input_len, options.random_range_ratio, number, rng)
    outputs = random_lengths(options.output_len, options.random_range_ratio, number, rng)
    prompts = [tuple(tokens.integers(0, vocab, n).tolist()) for n in inputs]
    portion = share_of(options, num_adapters)
    who = assign_adapters(assignment_of(options, num_adapters), number, num_adapters, portion, rng)
    return [Item(p, int(n), a) for p, n, a in zip(prompts, outputs, who, strict=True)]


def longest(items: Sequence[Item]) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(item.tokens for item in items)


# ---- files -----------------------------------------------------------------------------------------------------------
def read(path: str, vocab: int, seed: int, limit: int | None = None) -> list[Item]:
    """The first `limit` requests of a file of one JSON object a line:

    {"prompt_token_ids": [...], "output_len": 64, "adapter": 3}, or "prompt_len": 128 for that many random tokens; no
    "adapter", or null, is the base model. vocab: of the random tokens, and a bound on the given ones.

    Raises: ConfigError naming the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"the workload {path} cannot be read: {exc}") from None
    rng = np.random.default_rng(seed)
    items = []
    for number, line in enumerate(lines, 1):
        if line.strip() and (limit is None or len(items) < limit):
            try:
                items.append(_item(line, vocab, rng))
            except ValueError as exc:
                raise ConfigError(f"line {number} of the workload {path}: {exc}") from None
    if not items or len(items) < (limit or 0):
        raise ConfigError(
            f"the workload {path} holds {len(items)} requests" + (f", {limit} are asked for" * bool(limit))
        )
    return items


def _item(line: str, vocab: int, rng: np.random.Generator) -> Item:
    try:
        entry = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError("is no JSON object")
    unknown = sorted(set(entry) - {"prompt_token_ids", "prompt_len", "output_len", "adapter"})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    if ("prompt_token_ids" in entry) == ("prompt_len" in entry):
        raise ValueError("needs either prompt_token_ids or prompt_len")
    adapter = entry.get("adapter")
    if adapter is not None:
        _whole("adapter", adapter, 0, MAX_ADAPTER)
    if "prompt_len" in entry:
        ids = rng.integers(0, vocab, _whole("prompt_len", entry["prompt_len"], 1)).tolist()
    else:
        ids = entry["prompt_token_ids"]
        if not isinstance(ids, list) or not ids:
            raise ValueError("prompt_token_ids must be a list of at least one integer")
        for token in ids:
            if _whole("each of prompt_token_ids", token, 0) >= vocab:
                raise ValueError(f"token {token} is outside the vocabulary of {vocab}")
    return Item(tuple(ids), _whole("output_len", entry.get("output_len"), 1), adapter)


def _whole(name: str, value: Any, low: int, high: int = MAX_TOKENS) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {str(value)[:40]}")
    return value


def write(items: Sequence[Item], path: str) -> None:
    """The file that `read` reads. Raises: ConfigError."""
    lines = [
        json.dumps({"prompt_token_ids": i.prompt_token_ids, "output_len": i.output_len, "adapter": i.adapter})
        for i in items
    ]
    try:
        Path(path).write_text("\n".join(lines) + "\n")
    except OSError as exc:
        raise ConfigError(f"the workload cannot be written to {path}: {exc}") from None
