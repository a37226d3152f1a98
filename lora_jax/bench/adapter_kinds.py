"""Kinds of random adapters: of which ranks, on which linears. Plain Python."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterKind:
    """ranks: of the adapters, in turn. linears: names as in PEFT's target_modules; none: all of the decoder layers."""

    ranks: tuple[int, ...]
    linears: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> AdapterKind:
        """argparse's type= of "64", "8,16,64" or "16:q_proj,v_proj"."""
        ranks, colon, linears = text.partition(":")
        try:
            kind = cls(tuple(map(int, ranks.split(","))), tuple(linears.split(",")) if colon else ())
        except ValueError:
            kind = cls((0,))
        if min(kind.ranks) < 1:
            raise argparse.ArgumentTypeError(f'must be ranks and linears, as in "8,64:q_proj,v_proj", got {text!r}')
        if unknown := set(kind.linears) - set(LINEARS):
            raise argparse.ArgumentTypeError(f"{text!r}: {sorted(unknown)[0]!r} is none of {', '.join(LINEARS)}")
        return kind

    def rank(self, i: int) -> int:
        """Of the i-th adapter."""
        return self.ranks[i % len(self.ranks)]

    def of(self, n: int) -> str:
        """n of them, in words."""
        ranks = sorted({self.rank(i) for i in range(n)})
        text = f"{n} adapter{'s' if n > 1 else ''} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return text + (f" on {', '.join(self.linears)}" if self.linears else "")
