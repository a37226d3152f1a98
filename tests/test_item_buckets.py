"""Decode steps for few items of adapters beside the one for all: which there are, who chooses, that tokens do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest
from lora_jax.kernels.lora_items import FIELDS

import lora_jax.spec
from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.config import CacheConfig, LoRAConfig, SchedulerConfig
from lora_jax.lora.active import ItemBuckets
from lora_jax.lora.slots import SlotManager
from lora_jax.request import Request
from lora_jax.scheduler import Scheduler
from lora_jax.spec import step_entries
from lora_jax.step_keys import StepKey, step_keys
from tests.lora.test_slots import of_rank
from tests.support import tiny

RANKS = {"a": 4, "b": 16, "c": 33, "d": 40}


def buckets(max_loras: int, max_lora_rank: int, implementation: str = "triton") -> ItemBuckets:
    return ItemBuckets(LoRAConfig(max_loras, max_lora_rank, max_loras), implementation)


@pytest.mark.parametrize(
    ("max_loras", "rank", "rows", "smaller"),
    [
        (8, 16, 64, ()),  # all are few
        (32, 16, 8, ()),
        (32, 16, 16, (8,)),
        (32, 16, 64, (8,)),
        (8, 64, 1, ()),
        (8, 64, 4, (8,)),
        (32, 64, 64, (8, 64)),
        (32, 256, 64, (8, 64)),  # of 512
        (64, 256, 64, (8, 64, 512)),
        (64, 256, 65, ()),  # steps whose items are of tiles of rows
    ],
)
def test_there_are_smaller_steps_where_slots_hold_more(max_loras, rank, rows, smaller):
    assert buckets(max_loras, rank).smaller(rows) == smaller
    assert buckets(max_loras, rank, "xla").smaller(rows) == (), "no kernel works item by item"


def test_the_smallest_that_holds_all_is_chosen():
    """An item is 16 ranks, and large adapters have 2 or a multiple of 4."""
    of = buckets(32, 64)
    ranks = lambda *ranks: [of_rank(str(i), rank) for i, rank in enumerate(ranks)]  # noqa: E731
    assert of.choose(64, []) == 8
    assert of.choose(64, ranks(*[16] * 8)) == 8 and of.choose(64, ranks(*[1] * 9)) == 64
    assert of.choose(64, ranks(17, 64, 32)) == 8 and of.choose(64, ranks(17, 64, 33)) == 64
    assert of.choose(64, ranks(*[64] * 16)) == 64 and of.choose(64, ranks(*[64] * 16, 1)) == 0
    assert of.choose(1, ranks(64)) == 0 and of.choose(2, ranks(64)) == 0 and of.choose(4, ranks(64)) == 8


def test_keys_name_them():
    scheduler = SchedulerConfig(64, 64, 64)
    keys = step_keys(scheduler, True, buckets(32, 16).smaller)
    assert [str(key) for key in keys if key.items] == ["decode[16]+lora[8]", "decode[32]+lora[8]", "decode[64]+lora[8]"]
    assert {key for key in keys if not key.items} == set(step_keys(scheduler, True))
    assert len(set(keys)) == len(keys)


def test_the_scheduler_tells_who_is_in_the_step():
    slots, asked = SlotManager(2, 4), []

    def choose(rows, adapters):
        asked.append((rows, {adapter.name for adapter in adapters}))
        return 8

    scheduler = Scheduler(SchedulerConfig(4, 16, 16), CacheConfig(4, 32), slots, choose)
    a, b = of_rank("a", 4), of_rank("b", 16)
    slots.register(a)
    slots.register(b)
    for i, adapter in enumerate((a, None, b, a)):
        request = Request(f"r{i}", [1, 2], SamplingParams(max_tokens=9), adapter=adapter)
        request.max_tokens = 9
        scheduler.add(request)
    keys = []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        keys.append(plan.key)
        scheduler.resolve(plan, {row.request.request_id: 7 for row in plan.rows if row.samples})
    assert keys == [StepKey("prefill", 16, True)] + [StepKey("decode", 4, True, items=8)] * 2
    assert asked == [(4, {"a", "b"})] * 2, "of a decode step, once, without the base model"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """On a CPU there is one decode step a number of rows; here as on a GPU."""
    folder = tmp_path_factory.mktemp("buckets")
    base = tiny.save_base("llama", folder / "base")
    paths = {
        name: tiny.save_adapter(base, folder / name, seed=i, r=rank, lora_alpha=rank, target_modules=tiny.ALL_LINEAR)
        for i, (name, rank) in enumerate(RANKS.items())
    }
    small = dict(dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, disable_tqdm=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_jax.spec, "ItemBuckets", lambda config, implementation: ItemBuckets(config, "triton"))
        llm = LLM(str(base), enable_lora=True, max_loras=4, max_lora_rank=64, **small)
        yield llm, paths, {name: tiny.Oracle(base, path) for name, path in [(None, None), *paths.items()]}


@pytest.mark.parametrize(
    ("names", "ran"),
    [
        (["a", None, "b", "a"], "decode[4]+lora[8]"),  # two items
        (["c", "b", None, "a"], "decode[4]+lora[8]"),  # six
        (["c", "d", "a", "b"], "decode[4]+lora"),  # ten
        (["c", "d"], "decode[2]+lora"),  # all that two rows can be
        ([None, None, None], "decode[4]"),
    ],
)
def test_a_batch_runs_the_smallest(served, names, ran):
    llm, paths, oracles = served
    hits = lambda: {row["key"]: row["hits"] for row in llm.step_table.report()}  # noqa: E731
    ids = [np.random.default_rng(i).integers(3, tiny.VOCAB, 4 + i).tolist() for i in range(len(names))]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    loras = [name and LoRARequest(name, 1, str(paths[name])) for name in names]
    generate = lambda: llm.generate([{"prompt_token_ids": i} for i in ids], params, loras, use_tqdm=False)  # noqa: E731
    generate()  # the adapters get to their slots, and requests begin as they do
    before, outputs = hits(), generate()
    for name, prompt, output in zip(names, ids, outputs, strict=True):
        tokens, gap = oracles[name].greedy(prompt, 5)
        assert output.outputs[0].token_ids == tokens or gap < 1e-3, name
    assert {key for key, n in hits().items() if n > before[key] and key.startswith("decode")} == {ran}
    assert llm.engine.stats()["compilations_after_warmup"] == 0


def test_their_lists_have_so_much_room(served):
    llm, _, _ = served
    spec = llm.engine._runtime.spec
    entries = step_entries(spec, llm.engine._runtime._params)
    room = {str(key): entry.args[-1].shape[1] // FIELDS for key, entry in entries.items() if "decode[4]+" in str(key)}
    assert room == {"decode[4]+lora": 16, "decode[4]+lora[8]": 8}
