"""Tile sizes from shapes alone: one rule for every card, no count of multiprocessors. What was measured on a card comes first
(`tuned.rule`).

The rules are sized for the smallest card (99 KB of shared memory a block: L4, RTX 4090) and for enough programs to fill
the largest. Tests compile every shape of cases.py for both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .lora_items import ITEM
from .lora_layout import cdiv
from .tuned import rule

ROWS_ONE_BY_ONE = 64  # up to here one row a program; above, tiles of rows with tensor-core products
ROW_PROGRAMS = 1024  # wanted in a grid of the one-row form: its programs are short, latency counts
TILE_PROGRAMS = 384  # wanted in a grid of row tiles
TILE_PARTS = 8  # at most, in row tiles: the expand reads them all again in every column tile
STAGED_BYTES = 24 << 10  # operands of one step of a pipelined product; the smallest cards hold four


@dataclass(frozen=True)
class ShrinkTiles:
    """block_t rows, block_c rank rows, block_k inputs a step, `steps` of them a program, `parts` programs along K."""

    block_t: int
    block_c: int
    block_k: int
    steps: int
    parts: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpandTiles:
    """block_t rows at a time, block_n columns, block_r rank rows a step; a program does `turns` such tiles of rows."""

    block_t: int
    block_n: int
    block_r: int
    turns: int
    num_warps: int
    num_stages: int


def _ceil_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _clamp_power(n: int, low: int, high: int) -> int:
    """The power of two at or below n, between low and high."""
    return max(low, min(high, 1 << (max(n, 1).bit_length() - 1)))


def _row_block(rows: int, itemsize: int) -> int:
    # float32 products run without tensor cores: a smaller tile compiles in a quarter of the time and is no slower
    return 1 if rows <= ROWS_ONE_BY_ONE else _clamp_power(rows // 8, 16, 64 if itemsize < 4 else 16)


def _warps(elements: int) -> int:
    """64 elements of a one-row tile a thread: eight loads of 16 bytes in flight."""
    return _clamp_power(elements // 2048, 1, 4)


@rule
def shrink_tiles(rows: int, size: int, ranks: int, itemsize: int) -> ShrinkTiles:
    """rows T, size K, ranks C = n*R (any number: blocks of its largest power-of-two divisor, at most 256)."""
    block_t, block_c = _row_block(rows, itemsize), min(ranks & -ranks, 256)
    one_row = block_t == 1
    if one_row:
        block_k = _clamp_power(4096 // block_c, 32, 256)
    else:
        block_k = _clamp_power(
            STAGED_BYTES // ((block_t + max(block_c, 16)) * itemsize), 16, 128 if itemsize < 4 else 32
        )
    block_k = max(16, min(block_k, _ceil_power(size)))
    blocks, programs = cdiv(size, block_k), cdiv(rows, block_t) * (ranks // block_c)
    wanted = min(cdiv(ROW_PROGRAMS, programs), 32) if one_row else min(cdiv(TILE_PROGRAMS, programs), TILE_PARTS)
    steps = cdiv(blocks, min(blocks, wanted))
    warps = _warps(block_c * block_k) if one_row else (8 if block_t * block_c > 8192 else 4)
    return ShrinkTiles(block_t, block_c, block_k, steps, cdiv(blocks, steps), warps, num_stages=3)


@rule
def expand_tiles(rows: int, slices: tuple[int, ...], rank: int, itemsize: int) -> ExpandTiles:
    """rows T, slices: output widths, rank R (a power of two)."""
    block_t, widest = _row_block(rows, itemsize), max(_ceil_power(max(slices)), 16)
    if block_t == 1:
        block_r = min(rank, 64)
        block_n = min(_clamp_power(2048 // block_r, 64, 256), widest)
        programs = rows * sum(cdiv(size, block_n) for size in slices)
        # a program takes time also where no row has an adapter
        turns = _clamp_power(programs // (2 * ROW_PROGRAMS), 1, 16)
        return ExpandTiles(1, block_n, block_r, turns, _warps(block_r * block_n), num_stages=1)
    return ExpandTiles(block_t, min(128, widest), min(rank, 32), 1, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class MatmulTiles:
    """block_n columns, block_k inputs a step, `parts` programs along K."""

    block_n: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int


MAX_ROWS = 64  # of products of our own; with more XLA's are as fast
MATMUL_PROGRAMS = 256  # wanted in a grid: two a multiprocessor of the largest cards
MATMUL_PROGRAMS_MANY = 96  # with many rows, which every tile of columns reads again: fewer, with more columns, win
SHORTEST_PART = 1024  # inputs a program: below, the partial sums cost more than more programs win


@rule
def matmul_tiles(rows: int, inputs: int, outputs: int, itemsize: int, adapters: bool = False) -> MatmulTiles:
    """rows R (at most MAX_ROWS), inputs K and outputs N, multiples of 64. adapters: leave room for the programs of `fused_lora`.
    Measured on an H200 (docs/performance.md)."""
    many = rows > 16
    programs = MATMUL_PROGRAMS_MANY if many else MATMUL_PROGRAMS
    wide = many and outputs % 128 == 0 and outputs // 128 >= programs
    block_n, parts = 128 if wide else 64, 1
    while (
        outputs // block_n * parts < programs and inputs % (parts * 128) == 0 and inputs // (parts * 2) >= SHORTEST_PART
    ):
        parts *= 2
    long_steps = not wide and itemsize < 4 and inputs % (parts * 128) == 0 and not (many and adapters)
    block_k = 128 if long_steps else 64 if itemsize < 4 else 32
    stages = (4 if many else 3) if long_steps else 6 if many and adapters and not wide else 5
    return MatmulTiles(block_n, block_k, parts, num_warps=4, num_stages=stages)


@rule
def swiglu_tiles(rows: int, inputs: int, outputs: int, itemsize: int) -> MatmulTiles:
    """rows R (at most 64), inputs K, outputs F: columns of each half, of which a program takes block_n of both. Measured on an
    H200 (docs/performance.md)."""
    return MatmulTiles(64, 64 if itemsize < 4 else 32, 1, num_warps=4, num_stages=4)


@dataclass(frozen=True)
class LoRATiles:
    """Inside a product of few rows: groups * parts programs shrink, `items` items a pass and block_k inputs a step; chunk rank
    rows a step of the expand. joined: the last program of a pass adds its parts up, and the expand reads h like a product
    its inputs, else all that read parts do and each finds its rows' own. spread: those that shrink lie among the programs
    of the product, else before them all: cards deal programs out in runs, to neighbours that share their way to memory, so this
    evens out a product of one round."""

    groups: int
    items: int
    parts: int
    block_k: int
    chunk: int
    joined: bool
    spread: bool


FEW_ITEMS = 8  # up to which a program that waited finds its rows' own, of one item each, faster than it reads a matrix
# Programs that shrink many items for many rows; half as many beside large tiles, whose registers they share.
SHRINKERS = 64


@rule
def lora_tiles(
    rows: int, inputs: int, slices: int, items: int, rank: int, itemsize: int, columns: int, *, waits: bool
) -> LoRATiles:
    """rows T, inputs K (a multiple of 64), slices n, items J, padded rank R, columns that a program of the product computes. waits:
    whether programs wait for the shrink from the start, rather than in the middle of their own work. Measured on an H200
    (docs/performance.md)."""
    many, crowd = rows > 16, items > FEW_ITEMS
    short = inputs <= 4096 and waits  # a product that ends soon
    most = 64 if many else 256 if slices == 1 and short else 128
    block_k = most // (1 if itemsize < 4 else 2)
    while inputs % block_k:
        block_k //= 2
    part = 512 if inputs <= 4096 and (slices == 1 or many != waits and (many or not crowd)) else 1024
    parts, together = cdiv(inputs, part), 1  # items a pass: rows are read once for all of them
    if many and crowd:
        while _ceil_power(2 * together * slices) * ITEM <= (columns if itemsize < 4 else 64):
            together *= 2
        wanted = min(SHRINKERS // (1 if waits else 2) // min(cdiv(items, together), 16), 16)
        parts = cdiv(inputs // block_k, cdiv(inputs // block_k, wanted))  # none of them empty
    elif many and inputs <= 4096:
        together = max(1, 4 // slices)
    elif crowd and itemsize < 4:
        together = max(1, 4 // _ceil_power(slices))
    parts = max(1, min(16, parts, inputs // block_k))
    groups = min(cdiv(items, together), 8 if not crowd else 16 if many else 32)
    spread = many and waits and slices > 1
    joined = crowd or spread or not waits or rank > ITEM
    if many:
        long = itemsize < 4 and (not joined or crowd and short and slices == 1 and rank <= ITEM)
    else:
        long = not joined or itemsize < 4 and (crowd or waits)
    return LoRATiles(groups, together, parts, block_k, 64 if long else 32, joined, spread)


TILE_SHRINKERS = 256  # programs wanted in a grid that shrinks tiles of rows: two a multiprocessor of the largest cards
TILE_SHRINK_PARTS = 8  # of K at most
SHORTEST_SHRINK = 256  # inputs


class ShrinkCut(NamedTuple):
    """group: items that share a pass over x. block_k: inputs a step. parts: programs along K."""

    group: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int

    def width(self, slices: int) -> int:
        """Columns of a group's product, all slices side by side, as tensor cores take them."""
        return self.group * ITEM << (slices - 1).bit_length()


class ExpandCut(NamedTuple):
    """block_n: columns of a program."""

    block_n: int
    num_warps: int
    num_stages: int


def tile_rows(rows: int, itemsize: int) -> int:
    """BT of rows T: long enough for few readings of A and B, short enough to hold few adapters, and for tiles to fill a card.
    Measured on an H200 (docs/performance.md)."""
    return _clamp_power(rows // 16, 16, 32 if itemsize < 4 else 16)


def shrink_cut(rows: int, inputs: int, block_t: int, slices: int, itemsize: int) -> ShrinkCut:
    """rows T, inputs K (a multiple of 16), slices n. Measured on an H200 (docs/performance.md)."""
    block_k = 128 if itemsize < 4 and block_t <= 32 else 64 if itemsize < 4 else 32
    while inputs % block_k:
        block_k //= 2
    wanted = min(TILE_SHRINK_PARTS, TILE_SHRINKERS // cdiv(rows, block_t))
    parts = max(1, min(wanted, inputs // max(block_k, SHORTEST_SHRINK)))
    return ShrinkCut(1 if slices > 2 else 2, block_k, parts, num_warps=4, num_stages=3)


def expand_cut(widths: Sequence[int], block_t: int) -> ExpandCut:
    """widths: of the slices, multiples of 16, none of which shares a program with another."""
    block_n = 128
    while any(width % block_n for width in widths):
        block_n //= 2
    return ExpandCut(block_n, 8 if block_t * block_n > 4096 else 4, num_stages=3)


def norm_warps(rows: int, size: int) -> int:
    """Of a program that normalises one row: few rows leave room for many threads each."""
    elements = 128 if rows <= 16 else 256 if rows <= 64 else 512  # a warp
    return _clamp_power(size // elements, 1, 32)


@dataclass(frozen=True)
class AttentionTiles:
    """step_tokens keys a step, `parts` programs along a row's context. vector: one query head a program, without tensor cores;
    lanes: and a softmax for each of the step's places, which are joined at the end."""

    step_tokens: int
    parts: int
    vector: bool
    lanes: bool
    num_warps: int
    num_stages: int


ATTENTION_PROGRAMS = 256
ATTENTION_PARTS = 16  # at most
SHORT_CONTEXT = 512  # tokens: up to here latency counts, above bandwidth
KEYS_AND_VALUES = 64 << 10  # bytes of one step in shared memory
WHOLE_CONTEXT = 256  # tokens: up to here putting parts together costs more than they save


@rule
def attention_tiles(rows: int, kv_heads: int, group: int, tokens: int, head_dim: int, itemsize: int) -> AttentionTiles:
    """rows R, kv_heads K, group G query heads a KV head, tokens: the longest context that the block tables can hold."""
    programs, parts = rows * kv_heads, 1
    if group == 1 and tokens <= SHORT_CONTEXT:  # many programs: small ones, of which more are under way at a time
        step, warps = (16, 1) if programs >= 2048 else (32, 2) if programs >= 512 else (32, 4)
        vector, lanes, stages = True, programs < 512, 1
    else:
        step = min(64, KEYS_AND_VALUES // (2 * _ceil_power(head_dim) * itemsize))
        warps, vector, lanes, stages = 4, False, False, 2
    most = 1 if vector and tokens <= WHOLE_CONTEXT else ATTENTION_PARTS
    while parts < most and programs * parts < ATTENTION_PROGRAMS and parts * step < tokens:
        parts *= 2
    return AttentionTiles(step, parts, vector, lanes, warps, stages)
