"""What a step with adapters has to compute, from the adapters in the slots."""

from __future__ import annotations

import numpy as np
import pytest
from lora_jax.kernels.lora_items import FIELDS, ITEM
from lora_jax.kernels.tile_items import OWNER

from lora_jax.config import LoRAConfig
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
        a, b = np.ones((rank, spec.in_features), np.float32), np.ones((rank, spec.out_features), np.float32)
        modules[spec.name] = LoRAWeights(spec.name, a, b, 1.0)
    return Adapter(0, "a", "", "", max(ranks.values()), modules, LoadReport("a", "", "", 1, {}, {}, (), (), (), 0, ()))


def of_slots(slots: int = SLOTS, rank: int = PADDED) -> SlotRanks:
    return SlotRanks(group_shapes(SITES), LoRAConfig(slots, rank, slots), 2)


def put(ranks: SlotRanks, slot: int, given: Adapter) -> None:
    """In the places that make B's rows those of slots side by side."""
    first = slot * PADDED // ITEM
    ranks.put(slot, range(first, first + -(-given.rank // ITEM)), given, TARGETS)


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


def few(ranks: SlotRanks, slots, bucket: int = 8) -> np.ndarray:
    """Of a step of `bucket` rows, the first of which have these slots."""
    ids = np.full(bucket, -1, np.int32)
    ids[: len(slots)] = slots
    return ranks.items(ids, bucket)


def expected(**ranks: int) -> list[tuple[int, int]]:
    return [(int(slot[1:]), r) for slot, rank in ranks.items() for r in range(rank)]


def test_each_linear_has_the_rank_rows_of_its_own_modules():
    ranks = of_slots()
    put(ranks, 0, adapter(m0_q=5, m1_v=40))
    put(ranks, 2, adapter(m1_down=16, head=64, embed=64))
    qkv, down = listed(few(ranks, [-1, 2, 0, 0, 2]))
    assert qkv == expected(s0=40) and down == expected(s2=16)
    assert listed(few(ranks, [2])) == [[], expected(s2=16)] and listed(few(ranks, [-1])) == [[], []]


def test_a_slot_that_is_written_again_forgets_what_it_held():
    ranks = of_slots()
    put(ranks, 1, adapter(m0_q=64, m0_down=3))
    before = few(ranks, [1])
    put(ranks, 1, adapter(m0_k=8))
    assert listed(few(ranks, [1])) == [expected(s1=8), []]
    assert listed(before) == [expected(s1=64), expected(s1=3)], "a step that was listed before keeps its list"


@pytest.mark.parametrize("rank", [1, 16, 17, 64])
def test_there_is_room_for_every_slot_at_the_largest_rank(rank):
    ranks = of_slots()
    for slot in range(SLOTS):
        put(ranks, slot, adapter(m0_q=rank, m0_down=PADDED))
    assert listed(few(ranks, range(SLOTS))) == [expected(s0=r, s1=r, s2=r) for r in (rank, PADDED)]


def test_the_list_is_made_anew_only_when_other_slots_are_in_use():
    ranks = of_slots()
    put(ranks, 1, adapter(m0_q=8))
    first = few(ranks, [1, -1], 2)
    assert few(ranks, [1, 1], 2) is first and few(ranks, [1], 64).shape[1] > first.shape[1]
    assert few(ranks, [-1], 2) is not first
    assert first.shape[1] == FIELDS * 8, "two rows have two adapters at most, of four items each"


def tiles_of(items: np.ndarray, tiles: int) -> list[list[set[tuple[int, int]]]]:
    """(slot, rank row) that each tile of each linear computes."""
    room = items.shape[1] - tiles

    def rows(line, begin, count) -> set[tuple[int, int]]:
        numbers = [int(r) for r in line[begin : begin + count].ravel() if r >= 0]
        found = {divmod(r % (1 << OWNER), PADDED) for r in numbers}
        assert all(r >> OWNER == r % (1 << OWNER) // PADDED for r in numbers), "a rank row under another slot"
        return found

    return [[rows(line, begin, count) for begin, count in line[room:, :2]] for line in items]


def test_with_many_rows_each_tile_has_the_rank_rows_of_its_own_slots():
    ranks = of_slots()
    put(ranks, 0, adapter(m0_q=5, m1_v=40))
    put(ranks, 2, adapter(m1_down=16))
    ids = np.repeat([0, 2, -1, 2], [10, 10, 40, 5]).astype(np.int32)  # 65 rows: five tiles of 16
    qkv, down = tiles_of(ranks.items(ids, 4), 5)
    assert qkv == [set(expected(s0=40)), set(), set(), set(), set()]
    assert down == [set(expected(s2=16)), set(expected(s2=16)), set(), set(expected(s2=16)), set(expected(s2=16))]
    assert ranks.items(ids.copy(), 4) is ranks.items(ids, 4)
    put(ranks, 0, adapter(m0_q=7))
    assert tiles_of(ranks.items(ids, 4), 5)[0][0] == set(expected(s0=7))


def test_scratch_is_that_of_the_largest_linear():
    """h and its parts as the kernels have them, of a Llama-2-7B's qkv."""
    limits = of_slots(32, 256)
    room = limits.items(np.full(2048, -1, np.int32), 64).shape[1] - 2048 // 32
    h, parts = 3 * 2 * room * 32 * 16 * 2, 4 * room * 32 * 64 * 4
    assert h + parts <= limits.scratch_bytes(2048, 64) <= 90 << 20
    assert of_slots(8, 16).scratch_bytes(2048, 64) < 8 << 20


def test_the_kind_of_list_depends_on_the_rows_alone():
    """And its shape on what a StepKey and the engine's limits say: adapters come and go without a compilation."""
    ranks = of_slots()
    empty = {rows: ranks.items(np.full(rows, -1, np.int32), 8) for rows in (64, 65, 2048)}
    assert {rows: items.ndim for rows, items in empty.items()} == {64: 2, 65: 3, 2048: 3}
    for slot in range(SLOTS):
        put(ranks, slot, adapter(m0_q=PADDED, m0_down=PADDED))
    for rows, items in empty.items():
        full = ranks.items((np.arange(rows) * 8 // rows % SLOTS).astype(np.int32), 8)
        assert full.shape == items.shape and full.dtype == items.dtype == np.int32


def test_rank_rows_are_looked_up_in_the_places_of_a_slot():
    ranks = of_slots()
    ranks.put(0, (7, 2), adapter(m0_q=20), TARGETS)
    ranks.put(2, (5,), adapter(m0_q=3), TARGETS)
    row = few(ranks, [2, 0])[0]
    room = len(row) // FIELDS
    b_rows, slots = row[: room * ITEM].reshape(room, ITEM), row[room * ITEM :][:3]
    assert slots.tolist() == [0, 0, 2]
    assert b_rows[:3, 0].tolist() == [7 * ITEM, 2 * ITEM, 5 * ITEM] and b_rows[1, 3] == 2 * ITEM + 3
    tiles = ranks.items(np.repeat([0, 2], [40, 30]).astype(np.int32), 2)[0]
    assert tiles[:2, 0].tolist() == [7 * ITEM, 2 * ITEM] and (2 << OWNER) + 5 * ITEM + 2 in tiles
    assert (1 << OWNER) + 5 * ITEM not in tiles


def test_slots_of_the_embedding_and_the_head():
    """Only adapters that change one of them are there, until the slot gets another."""
    ranks, ids = of_slots(), np.array([0, -1, 2, 1, 2], np.int32)
    assert ranks.end_slots(ids).tolist() == [-1] * 5
    put(ranks, 0, adapter(m0_q=4))
    put(ranks, 1, adapter(head=2))
    put(ranks, 2, adapter(m0_q=4, embed=2))
    assert ranks.end_slots(ids).tolist() == [-1, -1, 2, 1, 2] and ranks.end_slots(ids).dtype == np.int32
    put(ranks, 2, adapter(m1_down=3))
    assert ranks.end_slots(ids).tolist() == [-1, -1, -1, 1, -1]
