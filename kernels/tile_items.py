"""What a step of many rows has to compute of adapters, tile by tile: made on the host, read by the kernels of `tiled_lora`.

A tile of BT rows has an item for each ITEM rank rows of each slot that any of its rows uses. Letters: T rows, G linears of a
layer, S slots, R padded rank, J items of all tiles at most.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .lora_items import ITEM
from .lora_layout import cdiv
from .places import b_rows, own_places

OWNER = 20  # bits of a number below the slot that it belongs to
GROUP = 2  # a tile's first item is a multiple of it: so many share a pass over x, and none are of two tiles


def most_tile_items(rows: int, block_t: int, requests: int, slots: int, rank: int) -> int:
    """J for rows of so many requests, the rows of each side by side, and adapters of up to `rank` in so many slots."""
    tiles = cdiv(rows, block_t)
    # A request in two tiles crosses the border between them.
    meetings = min(rows, tiles * min(block_t, slots), tiles - 1 + requests)
    return meetings * cdiv(rank, ITEM) + (GROUP - 1) * tiles


def tile_items(
    slot_ids: np.ndarray,
    ranks: np.ndarray,
    padded_rank: int,
    block_t: int,
    room: int,
    places: np.ndarray | None = None,
) -> np.ndarray:
    """int32 [G, room + tiles, ITEM] for slot_ids [T] (-1: none). ranks [G, S]: rank rows of each slot for each linear, 0: none;
    places: of `places`. A list is of each item the rows of B [P * Q] of its rank rows, and above OWNER bits their slot, -1: none,
    then a line of each tile, which begins with the
    tile's first item and its number of items. Raises: ValueError for a rank above padded_rank, or too little room."""
    if ranks.max(initial=0) > padded_rank:
        raise ValueError(f"tile_items: a rank of {ranks.max()} in slots for {padded_rank}")
    own = own_places(ranks.shape[1]) if places is None else places
    if padded_rank // own.shape[1] * (own.max(initial=0) + 1) > 1 << OWNER or ranks.shape[1] > 1 << (31 - OWNER):
        raise ValueError(f"tile_items: no numbers for {ranks.shape[1]} slots of {own.max() + 1} places")
    tiles, used = cdiv(len(slot_ids), block_t), np.flatnonzero(slot_ids >= 0)
    present = np.zeros((tiles, ranks.shape[1]), bool)
    present[used // block_t, slot_ids[used]] = True
    tile, slot = np.nonzero(present)
    out = np.full((len(ranks), room + tiles, ITEM), -1, np.int32)
    seen: dict[bytes, np.ndarray] = {}
    for list_, of_slot in zip(out, ranks, strict=True):
        key = of_slot.tobytes()
        if key in seen:  # most often all linears have the same ranks
            list_[:] = seen[key]
        else:
            seen[key] = _fill(list_, tile, slot, of_slot, padded_rank, room, own)
    return out


def _fill(
    out: np.ndarray,
    tiles: np.ndarray,
    slots: np.ndarray,
    of_slot: np.ndarray,
    padded_rank: int,
    room: int,
    table: np.ndarray,
) -> np.ndarray:
    """tiles, slots: those that meet, in order of tiles. table: of places."""
    items = -(-of_slot[slots] // ITEM)
    meeting = np.repeat(np.arange(len(items)), items)
    place = np.arange(len(meeting))
    first = (place - (np.cumsum(items) - items)[meeting]) * ITEM
    tile, slot = tiles[meeting], slots[meeting]
    counts = np.bincount(tile, minlength=len(out) - room)
    places = -(-counts // GROUP) * GROUP
    begin = np.cumsum(places) - places
    if places.sum() > room:
        raise ValueError(f"tile_items: {places.sum()} items in room for {room}")
    rank = first[:, None] + np.arange(ITEM)
    slot = slot[:, None]
    number = (slot << OWNER) + b_rows(table, slot, np.minimum(rank, padded_rank - 1), padded_rank)
    rows = np.where(rank < of_slot[slot], number, -1)
    out[begin[tile] + place - (np.cumsum(counts) - counts)[tile]] = rows
    out[room:, 0], out[room:, 1] = begin, counts
    return out


def b_row_of(number: jax.Array) -> jax.Array:
    """The row of B of a number of a list; of -1 any."""
    return jnp.maximum(number, 0) & ((1 << OWNER) - 1)
