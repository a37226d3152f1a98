"""What a step with adapters has to compute, from the adapters in the slots."""

from __future__ import annotations

import numpy as np
import pytest
from lora_jax.kernels.lora_items import FIELDS, ITEM

from lora_jax.lora.active import SlotRanks
from lora_jax.lora.adapter import Adapter, LoadReport, LoRAWeights
from lora_jax.lora.sites import LoRASite, group_shapes, target_specs

SITES = [
    *(LoRASite(("layers", i, "qkv"), "qkv", i, 8, (8, 4, 4), (f"{i}.q", f"{i}.k", f"{i}.v")) for i in range(2)),
    LoRASite(("embed",), "embed", 0, 30, (8,), ("embed",), kind="embedding"),
    *(LoRASite(("layers", i, "down"), "down", i, 8, (8,), (f"{i}.down",)) for i in range(2)),
    LoRASite(("head",), "head", 0, 8, (30,), ("head",), head=True),
]
TARGETS = target_specs(SITES)
SLOTS, PADDED = 3, 64


def adapter(**ranks: int) -> Adapter:
    """ranks: of the modules, by name with "_" for "."."""
    modules = {}
    for name, rank in ranks.items():
        spec = TARGETS[name.lstrip("m").replace("_", ".")]
        a, b = np.ones((rank, spec.in_features), np.float32), np.ones((spec.out_features, rank), np.float32)
        modules[spec.name] = LoRAWeights(spec.name, a, b, 1.0)
    return Adapter(0, "a", "", "", max(ranks.values()), modules, LoadReport("a", "", "", 1, {}, {}, (), (), (), 0, ()))


def listed(items: np.ndarray) -> list[list[tuple[int, int]]]:
    """(slot, rank row) of every rank row that is computed, a list a linear; that B's rows are those is checked."""
    room, out = items.shape[1] // FIELDS, []
    for row in items:
        b_rows, fields, count = row[: room * ITEM].reshape(room, ITEM), row[room * ITEM :], row[room * (ITEM + 3)]
        rows = []
        for j in range(count):
            slot, first, ranks = fields[j], fields[room + j], fields[2 * room + j]
            assert 0 <= ranks <= ITEM and b_rows[j][:ranks].tolist() == [
                slot * PADDED + first + r for r in range(ranks)
            ]
            assert (b_rows[j] // PADDED == slot).all()
            rows += [(int(slot), int(first) + r) for r in range(ranks)]
        out.append(rows)
    return out


def expected(**ranks: int) -> list[tuple[int, int]]:
    return [(int(slot[1:]), r) for slot, rank in ranks.items() for r in range(rank)]


def test_each_linear_has_the_rank_rows_of_its_own_modules():
    ranks = SlotRanks(group_shapes(SITES), SLOTS, PADDED)
    ranks.put(0, adapter(m0_q=5, m1_v=40), TARGETS)
    ranks.put(2, adapter(m1_down=16, head=64, embed=64), TARGETS)
    qkv, down = listed(ranks.items([-1, 2, 0, 0, 2], 8))
    assert qkv == expected(s0=40) and down == expected(s2=16)
    assert listed(ranks.items([2], 8)) == [[], expected(s2=16)] and listed(ranks.items([-1], 8)) == [[], []]


def test_a_slot_that_is_written_again_forgets_what_it_held():
    ranks = SlotRanks(group_shapes(SITES), SLOTS, PADDED)
    ranks.put(1, adapter(m0_q=64, m0_down=3), TARGETS)
    before = ranks.items([1], 8)
    ranks.put(1, adapter(m0_k=8), TARGETS)
    assert listed(ranks.items([1], 8)) == [expected(s1=8), []]
    assert listed(before) == [expected(s1=64), expected(s1=3)], "a step that was listed before keeps its list"


@pytest.mark.parametrize("rank", [1, 16, 17, 64])
def test_there_is_room_for_every_slot_at_the_largest_rank(rank):
    ranks = SlotRanks(group_shapes(SITES), SLOTS, PADDED)
    for slot in range(SLOTS):
        ranks.put(slot, adapter(m0_q=rank, m0_down=PADDED), TARGETS)
    assert listed(ranks.items(range(SLOTS), 8)) == [expected(s0=r, s1=r, s2=r) for r in (rank, PADDED)]


def test_the_list_is_made_anew_only_when_other_slots_are_in_use():
    ranks = SlotRanks(group_shapes(SITES), SLOTS, PADDED)
    ranks.put(1, adapter(m0_q=8), TARGETS)
    first = ranks.items([1, -1], 2)
    assert ranks.items([1, 1], 2) is first and ranks.items([1], 64).shape[1] > first.shape[1]
    assert ranks.items([-1], 2) is not first
    assert first.shape[1] == FIELDS * 8, "two rows have two adapters at most, of four items each"
