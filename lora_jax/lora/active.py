"""Which rank rows the device slots hold for each linear of the decoder, and from them what a step with adapters has to compute.

How a linear gets its adapters depends on the rows of its step alone: with at most MAX_ROWS inside a kernel of its own
(`fused_lora`), with more beside its product (`tiled_lora`). The first is told per step, the second per tile of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lora_jax.kernels.lora_items import ITEM, items_of, most_items, work_items
from lora_jax.kernels.tile_items import most_tile_items, tile_items
from lora_jax.kernels.tuning import MAX_ROWS, shrink_cut, tile_rows

from ..config import LoRAConfig
from .adapter import Adapter, TargetSpec
from .sites import GroupShape, decoder_linears

ROOMS = (8, 64, 512)  # items of adapters: 8 are as many adapters of up to ITEM ranks


def _largest_room(max_loras: int, requests: int, padded_rank: int) -> int:
    """Items that adapters of so many requests can be."""
    return most_items(min(max_loras, requests), padded_rank)


class ItemBuckets:
    """The decode steps with adapters of a number of rows: one with room for all that adapters in the slots can be, named 0, and
    smaller ones, so that a step with few or small adapters does not pay for what it could have held. Without kernels
    that work item by item there are none."""

    def __init__(self, config: LoRAConfig, implementation: str):
        self._config, self._rooms = config, ROOMS if implementation == "triton" else ()

    def smaller(self, rows: int) -> tuple[int, ...]:
        """Rooms below the largest."""
        room = _largest_room(self._config.max_loras, rows, self._config.padded_rank)
        return tuple(n for n in self._rooms if n < room and rows <= MAX_ROWS)

    def choose(self, rows: int, adapters: Iterable[Adapter]) -> int:
        """The smallest room for these."""
        needed = sum(items_of(adapter.rank) for adapter in adapters)
        return next((n for n in self.smaller(rows) if needed <= n), 0)


class SlotRanks:
    """For one runtime. An adapter's rank for a linear is the largest over the layers and the fused slices, 0 where it has none."""

    def __init__(self, groups: Mapping[str, GroupShape], config: LoRAConfig, itemsize: int):
        """itemsize: of the adapters' dtype."""
        max_loras, padded_rank = config.max_loras, config.padded_rank
        self._groups = {name: i for i, name in enumerate(decoder_linears(groups))}
        self._ranks = np.zeros((len(self._groups), max_loras), np.int32)
        self._at_ends = np.zeros(max_loras, np.bool_)  # slots whose adapters change the embedding or the head
        self._places = np.zeros((max_loras, config.places_of_slot), np.int32)
        if config.places_of_slot == 1:
            self._places[:, 0] = range(max_loras)
        self._padded_rank, self._itemsize, self._num_places = padded_rank, itemsize, config.num_places
        self._listed: dict[tuple[int, int, int], tuple[Any, np.ndarray]] = {}  # for each shape the last

    def put(self, slot: int, places: Sequence[int], adapter: Adapter, targets: Mapping[str, TargetSpec]) -> None:
        """The adapter's weights lie in the slot, in these places, from now on."""
        self._listed.clear()
        self._places[slot, : len(places)] = places
        self._ranks[:, slot], self._at_ends[slot] = 0, False
        for module, weights in adapter.modules.items():
            group = self._groups.get(targets[module].group)
            if group is None:
                self._at_ends[slot] = True
            else:
                self._ranks[group, slot] = max(self._ranks[group, slot], weights.rank)

    def end_slots(self, slot_ids: np.ndarray) -> np.ndarray:
        """The slots for the embedding and the head: -1 also where an adapter has nothing for them, which costs nothing then."""
        return np.where((slot_ids >= 0) & self._at_ends[slot_ids], slot_ids, -1).astype(np.int32)

    def fill(self) -> None:
        """As if all slots held adapters of the largest rank for all linears: to time kernels without any. Slots share places where
        there are too few."""
        self._listed.clear()
        self._ranks[:] = self._padded_rank
        self._places = self.filled_places()

    def filled_places(self) -> np.ndarray:
        """Which places slots have after `fill`."""
        return (np.arange(self._places.size, dtype=np.int32) % self._num_places).reshape(self._places.shape)

    def items(self, slot_ids: np.ndarray, requests: int, room: int = 0) -> np.ndarray:
        """What kernels have to compute in a step whose rows, a bucket of them, have these slots, -1: none. Rows of a request lie
        side by side, and there are at most so many requests. room: of `ItemBuckets`. Of `Adapters` (two dimensions) or of
        `TileAdapters` (three); the shape follows from the three numbers. Read only: while nothing changes it is the same array."""
        rows, shape = len(slot_ids), (len(slot_ids), requests, room)
        used = tuple(sorted(set(slot_ids.tolist()) - {-1})) if rows <= MAX_ROWS else slot_ids.tobytes()
        last = self._listed.get(shape)
        if last is None or last[0] != used:
            if rows <= MAX_ROWS:
                made = self._of_step(slot_ids, room or self._room(rows, requests))
            else:
                made = self._of_tiles(slot_ids, requests)
            last = self._listed[shape] = used, made
        return last[1]

    def _room(self, rows: int, requests: int) -> int:
        return _largest_room(self._ranks.shape[1], min(rows, requests), self._padded_rank)

    def _of_step(self, slot_ids: np.ndarray, room: int) -> np.ndarray:
        return work_items(sorted(set(slot_ids.tolist()) - {-1}), self._ranks, self._padded_rank, room, self._places)

    def _of_tiles(self, slot_ids: np.ndarray, requests: int) -> np.ndarray:
        block_t, room = self._tiles(len(slot_ids), requests)
        return tile_items(slot_ids, self._ranks, self._padded_rank, block_t, room, self._places)

    def _tiles(self, rows: int, requests: int) -> tuple[int, int]:
        """(rows of a tile, room for items)."""
        block_t = tile_rows(rows, self._itemsize)
        return block_t, most_tile_items(rows, block_t, requests, self._ranks.shape[1], self._padded_rank)

    def scratch_bytes(self, rows: int, requests: int) -> int:
        """What the tiles of a step of many rows need of the device's memory, from above: h of three slices and its parts."""
        block_t, room = self._tiles(rows, requests)
        cut = shrink_cut(rows, 1 << 20, block_t, 3, self._itemsize)
        return room * block_t * 4 * (3 * ITEM + cut.parts * cut.width(3))
