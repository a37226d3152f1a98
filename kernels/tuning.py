"""Tile sizes from shapes alone: one rule for every card, no table, no count of multiprocessors.

The rules are sized for the smallest card (99 KB of shared memory a block: L4, RTX 4090) and for enough programs to fill
the largest. Tests compile every shape of cases.py for both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lora_layout import cdiv

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
    """block_t rows, block_n columns, block_r rank rows a step."""

    block_t: int
    block_n: int
    block_r: int
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


def expand_tiles(rows: int, slices: tuple[int, ...], rank: int, itemsize: int) -> ExpandTiles:
    """rows T, slices: output widths, rank R (a power of two)."""
    block_t, widest = _row_block(rows, itemsize), max(_ceil_power(max(slices)), 16)
    if block_t == 1:
        block_r = min(rank, 64)
        block_n = min(_clamp_power(2048 // block_r, 64, 256), widest)
        return ExpandTiles(1, block_n, block_r, _warps(block_r * block_n), num_stages=1)
    return ExpandTiles(block_t, min(128, widest), min(rank, 32), num_warps=4, num_stages=1)
