"""Comparing variants that take turns: order of the rounds, ratios of what was measured side by side. Plain Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

N = TypeVar("N")


@dataclass(frozen=True)
class Spread:
    """Of some numbers: median, quartiles (linear between neighbours), extremes."""

    median: float
    q25: float
    q75: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """values: one or more."""
        ordered = sorted(values)
        quartiles = _quantile(ordered, 0.25), _quantile(ordered, 0.75)
        return cls(statistics.median(ordered), *quartiles, ordered[0], ordered[-1])

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def _quantile(ordered: Sequence[float], p: float) -> float:
    at = p * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def paired_ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """values[i] / base[i], of the same round each: what slows the whole machine down for a while cancels out."""
    return [value / other for value, other in zip(values, base, strict=True)]


def order_of_round(names: Sequence[str], index: int) -> list[str]:
    """Which variant comes first moves on by one each round, and every other turn goes backwards: each variant has each place
    equally often, and not always the same one before it."""
    start = index % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if index // len(names) % 2 else order


def alternate(run_one: Mapping[N, Callable[[], Any]], ready: Mapping[N, Any], rounds: int) -> dict[N, list[Any]]:
    """Every round runs each once; who begins changes from round to round, so that no one always runs on a warmer card.
    ready: what is calibrated before the first round."""
    for timed in ready.values():
        timed.calibrate()
    names: list[N] = list(run_one)
    out: dict[N, list[Any]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            out[name].append(run_one[name]())
    return out
