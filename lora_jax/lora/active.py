"""Which rank rows the device slots hold for each linear of the decoder, and from them what a step with adapters has to compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from lora_jax.kernels.lora_items import most_items, work_items

from .adapter import Adapter, TargetSpec
from .sites import GroupShape, decoder_linears


class SlotRanks:
    """For one runtime. An adapter's rank for a linear is the largest over the layers and the fused slices, 0 where it has none."""

    def __init__(self, groups: Mapping[str, GroupShape], max_loras: int, padded_rank: int):
        self._groups = {name: i for i, name in enumerate(decoder_linears(groups))}
        self._ranks = np.zeros((len(self._groups), max_loras), np.int32)
        self._padded_rank = padded_rank
        self._listed: tuple[tuple, np.ndarray] | None = None

    def put(self, slot: int, adapter: Adapter, targets: Mapping[str, TargetSpec]) -> None:
        """The adapter's weights lie in the slot from now on."""
        self._listed = None
        self._ranks[:, slot] = 0
        for module, weights in adapter.modules.items():
            group = self._groups.get(targets[module].group)
            if group is not None:
                self._ranks[group, slot] = max(self._ranks[group, slot], weights.rank)

    def items(self, slots: Iterable[int], bucket: int) -> np.ndarray:
        """int32 [linears, J * FIELDS]: `work_items` of a step of `bucket` rows, which have these slots; -1 is none. Read only:
        as long as the same slots are in use it is the same array."""
        key = (tuple(sorted({slot for slot in slots if slot >= 0})), bucket)
        if self._listed is None or self._listed[0] != key:
            room = most_items(min(self._ranks.shape[1], bucket), self._padded_rank)
            self._listed = key, work_items(key[0], self._ranks, self._padded_rank, room)
        return self._listed[1]
