"""Tiles that were measured on a card, in place of those that the rules of `tuning` pick from shapes alone.

A table is in use while a program is traced (`tiles_in_use`). JAX's caches know it: what was traced with one table is not taken for
another, and nothing outside the block changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


class Key(NamedTuple):
    """A rule of `tuning`, and all of its arguments in order: ints, bools or tuples of ints."""

    rule: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class TileTable:
    """entries: (key, tiles) of what was measured to be faster than the rule's choice."""

    entries: frozenset[tuple[Key, Any]] = frozenset()

    @classmethod
    def of(cls, tiles: dict[Key, Any]) -> TileTable:
        return cls(frozenset(tiles.items()))

    @functools.cached_property
    def by_key(self) -> dict[Key, Any]:
        return dict(self.entries)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.entries)

    def __hash__(self) -> int:  # asked for at every traced call: entries are many
        return self._hash

    def get(self, key: Key) -> Any:
        return self.by_key.get(key)


@dataclass(eq=False)
class Recorder:
    """In a table's place: answers as `table` does, and keeps which keys were asked for, in order. Equal to no other, so that
    everything is traced anew."""

    table: TileTable = field(default_factory=TileTable)
    keys: dict[Key, None] = field(default_factory=dict)

    def get(self, key: Key) -> Any:
        self.keys.setdefault(key)
        return self.table.get(key)


RULES: dict[str, Callable[..., Any]] = {}
"""The rules' own choice by name, whatever table is in use."""

_in_use = jax.make_user_context(default_value=None)


def tiles_in_use(table: TileTable | Recorder | None) -> AbstractContextManager[Any]:
    """What is traced in this block, by this thread, takes its tiles from the table where it has some. An empty one is none."""
    return _in_use(table if isinstance(table, Recorder) or table and table.entries else None)


def rule(heuristic: Callable[P, T]) -> Callable[P, T]:
    """Makes a rule of a function from sizes to tiles: the table in use comes first."""
    name, signature = heuristic.__name__, inspect.signature(heuristic)
    RULES[name] = heuristic

    @functools.wraps(heuristic)
    def choose(*args: P.args, **kwargs: P.kwargs) -> T:
        table = _in_use.value
        if table is not None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            tiles = table.get(Key(name, tuple(given.arguments.values())))
            if tiles is not None:
                return tiles
        return heuristic(*args, **kwargs)

    return choose
