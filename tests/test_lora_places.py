"""An engine whose slots share few rank rows: right answers, nobody waits for ever, less memory, no compilation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.config import LARGEST_RANK, PLACE_RANK, CacheConfig, LoRAConfig, SchedulerConfig
from lora_jax.errors import ConfigError
from lora_jax.lora.slots import SlotManager
from lora_jax.request import Request
from lora_jax.scheduler import Scheduler
from tests.lora.test_slots import of_rank
from tests.support import tiny

RANKS = {"small": 4, "middle": 24, "large": 40, "other": 33}
SMALL = dict(dtype="float32", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, disable_tqdm=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(engine, adapters' folders, oracles). Six places: large and other, of three each, fit, and with small they do not."""
    folder = tmp_path_factory.mktemp("places")
    base, every = tiny.save_base("llama", folder / "base"), [*tiny.ALL_LINEAR, "lm_head", "embed_tokens"]
    paths = {
        name: tiny.save_adapter(base, folder / name, seed=i, r=rank, lora_alpha=rank, target_modules=every)
        for i, (name, rank) in enumerate(RANKS.items())
    }
    llm = LLM(str(base), enable_lora=True, max_loras=4, max_lora_rank=40, max_total_lora_rank=96, **SMALL)
    return llm, paths, {name: tiny.Oracle(base, path) for name, path in [(None, None), *paths.items()]}


def test_every_mixture_is_right_though_not_all_fit(served):
    llm, paths, oracles = served
    names = [None, "small", "large", "other", "middle", "large", "small", "other", "middle", None]
    ids = [np.random.default_rng(i).integers(3, tiny.VOCAB, 3 + i).tolist() for i in range(len(names))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=2)
    loras = [name and LoRARequest(name, 1, str(paths[name])) for name in names]
    for _ in range(2):  # again with the slots as they were left
        outputs = llm.generate([{"prompt_token_ids": i} for i in ids], params, loras, use_tqdm=False)
        for name, prompt, output in zip(names, ids, outputs, strict=True):
            want = oracles[name].logprobs(prompt)
            for place, entry in enumerate(output.prompt_logprobs[1:]):
                assert all(abs(v.logprob - want[place, t]) < 2e-4 for t, v in entry.items()), (name, place)
            tokens, gap = oracles[name].greedy(prompt, 6)
            assert output.outputs[0].token_ids == tokens or gap < 1e-3, name
    stats = llm.engine.stats()
    assert stats["compilations_after_warmup"] == 0 and stats["running"] == stats["waiting"] == 0
    assert llm.engine._slots.stats().evictions > 0, "all fitted"
    llm.engine.check_integrity()


def test_memory_follows_the_total(served):
    llm, _, _ = served
    full = dataclasses.replace(llm.engine._runtime.spec.lora.config, max_total_lora_rank=None)
    assert (full.num_places, llm.engine._runtime.spec.lora.config.num_places) == (16, 6)
    stacks = llm.engine._runtime._stacks
    assert all(array.shape[1] == 6 for name, ab in stacks.items() if name != "places" for array in ab)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_lora_rank=16, max_total_lora_rank=64), "max_total_lora_rank=64 needs a max_lora_rank above 16"),
        (
            dict(max_lora_rank=40, max_total_lora_rank=48),
            "has no room for one adapter of max_lora_rank=40: at least 64",
        ),
        (dict(max_lora_rank=40, max_total_lora_rank=0), "max_total_lora_rank"),
    ],
)
def test_limits_that_cannot_be_kept_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", load_format="dummy", enable_lora=True, max_loras=2, device="cpu", **changes, **SMALL)


def test_places_of_a_configuration():
    config = LoRAConfig(32, 256, 32)
    assert (config.num_places, config.place_rank, config.places_of_slot) == (
        512,
        PLACE_RANK,
        LARGEST_RANK // PLACE_RANK,
    )
    assert dataclasses.replace(config, max_total_lora_rank=1000).num_places == 62
    assert dataclasses.replace(config, max_total_lora_rank=10**6).num_places == 512, "more than slots can use"
    assert (LoRAConfig(8, 16, 8).num_places, LoRAConfig(8, 5, 8).place_rank) == (8, 8)


def test_a_large_adapter_does_not_wait_for_ever():
    """Small ones come without end, and are always enough to take every place that becomes free."""
    slots = SlotManager(4, 64, num_places=4, place_rank=16, most=4)
    scheduler = Scheduler(SchedulerConfig(8, 64, 64), CacheConfig(4, 64), slots)
    small, large = [of_rank(str(i), 16) for i in range(40)], of_rank("large", 64)
    for adapter in (*small, large):
        slots.register(adapter)
    requests: list[Request] = []

    def add(adapter) -> Request:
        n = len(requests)
        requests.append(Request(f"r{n}", [1, 2], SamplingParams(max_tokens=2 + n % 5), adapter=adapter))
        requests[-1].max_tokens = 2 + n % 5
        scheduler.add(requests[-1])
        return requests[-1]

    for i in range(6):
        add(small[i])
    waits, passed = add(large), 0
    for i in range(300):
        if waits.row >= 0:
            break
        add(small[i % len(small)])
        plan = scheduler.plan()
        assert plan is not None
        for row in plan.rows:
            passed += plan.phase == "prefill" and int(row.request.request_id[1:]) > 6
        sampled = {row.request.request_id: 7 for row in plan.rows if row.samples}
        for request in scheduler.resolve(plan, sampled):
            if len(request.output_token_ids) == request.max_tokens:
                scheduler.finish(request, "length")
        slots.check_integrity()
    assert waits.row >= 0, f"{passed} requests passed it"
