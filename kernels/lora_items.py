"""What a step with adapters has to compute, as lists of items: made on the host, read by the kernels of `fused_lora`.

An item is up to ITEM rank rows of one slot. Letters: G linears of a layer, S slots, R padded rank, J items at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .lora_layout import cdiv
from .places import b_rows, own_places

ITEM = 16  # rank rows
FIELDS = ITEM + 4  # numbers an item takes in a list of them
SLOT, FIRST, RANKS, COUNT = range(
    4
)  # fields behind the rows of B: of an item its slot, first rank row, rank rows; of the list


def most_items(slots: int, rank: int) -> int:
    """J for adapters of up to `rank` in so many slots: a multiple of 4, so that a step of the expand ends with it."""
    return 4 * cdiv(slots * items_of(rank), 4)


def items_of(rank: int) -> int:
    """Of an adapter of so many ranks: 1, 2 or a multiple of 4. So, larger adapters first, none reaches over the border of two steps
    of the expand, and the order in which its parts are added does not depend on who else is there."""
    n = cdiv(rank, ITEM)
    return n if n <= 2 else 4 * cdiv(n, 4)


def work_items(
    slots: Sequence[int], ranks: np.ndarray, padded_rank: int, room: int, places: np.ndarray | None = None
) -> np.ndarray:
    """int32 [G, room * FIELDS] for the distinct `slots` of a step. ranks [G, S]: rank rows of each slot for each linear, 0:
    none; places: of `places`. A list is the row of B [P * Q] of each rank row [room * ITEM], then each item's slot, first rank
    row and number of rank rows, which may be 0 [3 * room], then the number of items. Raises: ValueError for a rank above
    padded_rank, a slot that is none or named twice, too little room."""
    if ranks.max(initial=0) > padded_rank:
        raise ValueError(f"work_items: a rank of {ranks.max()} in slots for {padded_rank}")
    if len(set(slots)) < len(slots) or not all(0 <= s < ranks.shape[1] for s in slots):
        raise ValueError(f"work_items: slots must be distinct and of the {ranks.shape[1]}, got {list(slots)}")
    out = np.zeros((len(ranks), room * FIELDS), np.int32)
    for row, of_slot in zip(out, ranks, strict=True):
        larger_first = sorted((s for s in slots if of_slot[s] > 0), key=lambda s: (-items_of(of_slot[s]), s))
        items = [(s, i * ITEM, of_slot[s]) for s in larger_first for i in range(items_of(of_slot[s]))]
        if not items:
            continue
        if len(items) > room:
            raise ValueError(f"work_items: {len(items)} items in room for {room}")
        slot, first, rank = np.array(items, np.int32).T
        within = np.minimum(first[:, None] + np.arange(ITEM), padded_rank - 1)
        own = own_places(ranks.shape[1]) if places is None else places
        row[: len(items) * ITEM] = b_rows(own, slot[:, None], within, padded_rank).ravel()
        for i, values in enumerate((slot, first, np.clip(rank - first, 0, ITEM))):
            row[room * (ITEM + i) :][: len(items)] = values
        row[room * (ITEM + 3)] = len(items)
    return out
