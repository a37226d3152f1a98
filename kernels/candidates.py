"""Which tiles a rule of `tuning` could also have picked: those that a kernel takes, and the neighbours of a choice.

Sizes of shared memory are estimates from above; a program that needs more than a card has does not compile, and is not chosen.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from .in_kernel import padded_rows
from .lora_items import ITEM
from .lora_layout import cdiv
from .tuned import RULES, Key, TileTable
from .tuning import AttentionTiles, LoRATiles, MatmulTiles

# Bytes of shared memory that a block may have: L4, RTX 4090; H100 and later.
SMALLEST_CARD, LARGEST_CARD = 99 << 10, 227 << 10
MOST_PARTS, MOST_GROUPS = 16, 32
SHORTEST_PART = 256  # inputs a program of a product


# ---- 1. what a kernel takes -------------------------------------------------------------------------------------------
def _staged(bytes_a_step: int, stages: int, shared: int) -> bool:
    """With the products of Hopper's tensor cores Triton holds one step more than on the cards with less memory."""
    return bytes_a_step * (stages if shared > SMALLEST_CARD else max(stages - 1, 1)) <= shared


def _product(t: MatmulTiles, rows: int, inputs: int, outputs: int, itemsize: int, matrices: int, shared: int) -> bool:
    # float32 products run without tensor cores: large tiles take minutes to compile
    large = (128, 64) if itemsize == 4 else (256 // matrices, 256)
    padded = padded_rows(rows)
    return (
        64 <= t.block_n <= large[0]  # what `new_arrivals` counts
        and 16 <= t.block_k <= large[1]
        and outputs % t.block_n == 0
        and inputs % (t.parts * t.block_k) == 0
        and (t.parts == 1 or inputs // t.parts >= SHORTEST_PART)
        and t.parts <= MOST_PARTS
        and 2 <= t.num_warps <= 8
        and 2 <= t.num_stages <= 8
        and _staged((padded + matrices * t.block_n) * t.block_k * itemsize, t.num_stages, shared)
    )


def _matmul(t, shared, rows, inputs, outputs, itemsize, adapters) -> bool:
    return _product(t, rows, inputs, outputs, itemsize, 1, shared)


def _swiglu(t, shared, rows, inputs, outputs, itemsize) -> bool:
    return t.parts == 1 and _product(t, rows, inputs, outputs, itemsize, 2, shared)


def _lora(t: LoRATiles, shared, rows, inputs, slices, items, rank, itemsize, columns, waits) -> bool:
    width = padded_rows(t.items * slices * ITEM)
    staged = (padded_rows(rows) + width) * t.block_k * (2 if itemsize < 4 else 8)
    small = shared <= SMALLEST_CARD and itemsize < 4
    room = 40 << 10 if rows <= 16 else 32 << 10 if not small else 24 << 10 if columns > 64 else 16 << 10
    return (
        t.groups <= min(cdiv(items, t.items), MOST_GROUPS)
        and (t.joined or rank <= ITEM)  # else a program finds its rows' h in one place
        and width <= 128
        and (waits or not t.spread)
        and 32 <= t.block_k <= 512
        and inputs % t.block_k == 0
        and t.parts <= min(MOST_PARTS, inputs // t.block_k)
        and 32 <= t.chunk <= (32 if t.joined and (rows > 16 or itemsize == 4) and (slices > 1 or inputs > 4096) else 64)
        and staged <= room  # in a product's pipeline, which is sized without it
    )


def _attention(t: AttentionTiles, shared, rows, kv_heads, group, tokens, head_dim, itemsize) -> bool:
    padded = 1 << (head_dim - 1).bit_length()
    registers = t.step_tokens * padded // (32 * t.num_warps) <= 128  # elements of keys that a thread holds
    return (
        (not t.vector or group == 1 and registers)
        and (not t.lanes or t.vector and t.step_tokens <= 64)
        and 16 <= t.step_tokens <= 128
        and t.parts <= MOST_PARTS
        and (t.parts == 1 or (t.parts - 1) * t.step_tokens < tokens)
        and t.num_warps <= 8
        and t.num_stages <= 4
        and _staged(2 * t.step_tokens * padded * itemsize, t.num_stages, shared)
    )


_TAKES: dict[str, Callable[..., bool]] = {
    "matmul_tiles": _matmul,
    "swiglu_tiles": _swiglu,
    "lora_tiles": _lora,
    "attention_tiles": _attention,
}
TUNED_RULES = tuple(_TAKES)


def allowed(key: Key, tiles: Any, shared: int = LARGEST_CARD) -> bool:
    """Whether the kernel takes these tiles. The key is one that a rule was asked with."""
    return _powers(tiles) and _TAKES[key.rule](tiles, shared, *key.arguments)


def _powers(tiles: Any) -> bool:
    """Whether all sizes but counts of stages, parts and groups are powers of two."""
    sizes = {name: value for name, value in dataclasses.asdict(tiles).items() if not isinstance(value, bool)}
    free = ("num_stages", "parts", "groups")
    return all(n >= 1 and (name in free or n & (n - 1) == 0) for name, n in sizes.items())


# ---- 2. neighbours ---------------------------------------------------------------------------------------------------
def candidates(key: Key, around: Any = None, shared: int = SMALLEST_CARD) -> list[Any]:
    """Tiles that differ from `around` (None: the rule's own choice, without a table) in one size, and where that leaves no room in
    fewer stages; twice the columns also with twice the parts. None for a rule that is not in TUNED_RULES."""
    if key.rule not in _TAKES:
        return []
    base = RULES[key.rule](**named(key)) if around is None else around
    found: dict[Any, None] = {}
    for changes in _changes(base):
        tiles = dataclasses.replace(base, **changes)
        while not allowed(key, tiles, shared) and getattr(tiles, "num_stages", 1) > 2:
            tiles = dataclasses.replace(tiles, num_stages=tiles.num_stages - 1)
        if tiles != base and allowed(key, tiles, shared):
            found.setdefault(tiles)
    return list(found)


def _changes(base: Any) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for name, value in dataclasses.asdict(base).items():
        if name == "joined":
            out.append({name: not value} if value else {name: True, "chunk": min(base.chunk, 32)})
        elif isinstance(value, bool):
            out.append({name: not value} if name != "vector" else {"vector": not value, "lanes": False})
        elif name == "num_stages":
            out += [{name: value + 1}, {name: value - 1}]
        elif name == "items":  # what more items a pass leave for groups to do
            out += [{name: value * 2, "groups": cdiv(base.groups, 2)}, {name: value // 2}]
        elif name in ("parts", "groups"):
            out += [{name: value * 2}, {name: cdiv(value, 2)}]
        else:
            out += [{name: value * 2}, {name: value // 2}]
    if isinstance(base, MatmulTiles):
        out.append({"block_n": base.block_n * 2, "parts": base.parts * 2})
    return out


def named(key: Key) -> dict[str, Any]:
    """The arguments of a key by name. Raises: ValueError for a wrong number of them."""
    return dict(zip(inspect.signature(RULES[key.rule]).parameters, key.arguments, strict=True))


# ---- 3. as plain data ------------------------------------------------------------------------------------------------
def to_data(table: TileTable) -> list[dict[str, Any]]:
    """For JSON, in a fixed order."""
    entries = [
        {"rule": key.rule, "arguments": named(key), "tiles": dataclasses.asdict(tiles)} for key, tiles in table.entries
    ]
    return sorted(entries, key=repr)


def from_data(entries: Any) -> tuple[TileTable, int]:
    """(what of `to_data` is sound, how many entries are not): each is for a rule as it is now, and one that its kernel takes."""
    if not isinstance(entries, list):
        return TileTable(), 1
    found: dict[Key, Any] = {}
    for entry in entries:
        if (read := _entry(entry)) is not None:
            found[read[0]] = read[1]
    return TileTable.of(found), len(entries) - len(found)


def _entry(entry: Any) -> tuple[Key, Any] | None:
    if not isinstance(entry, dict) or set(entry) != {"rule", "arguments", "tiles"} or entry["rule"] not in TUNED_RULES:
        return None
    rule, given, tiles = entry["rule"], entry["arguments"], entry["tiles"]
    wanted = {name: p.annotation for name, p in inspect.signature(RULES[rule]).parameters.items()}
    if not isinstance(given, dict) or {name: type(value).__name__ for name, value in given.items()} != wanted:
        return None
    if not all(isinstance(value, bool) or 1 <= value < 1 << 31 for value in given.values()):
        return None
    key = Key(rule, tuple(given[name] for name in wanted))
    own = RULES[rule](**given)
    kinds = {name: type(value) for name, value in dataclasses.asdict(own).items()}
    if not isinstance(tiles, dict) or {name: type(value) for name, value in tiles.items()} != kinds:
        return None
    made = type(own)(**tiles)
    return (key, made) if allowed(key, made) else None
