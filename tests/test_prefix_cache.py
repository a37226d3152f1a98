"""Requests that begin with the same tokens share pages: in the pool, the scheduler, and an engine against transformers + PEFT."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.block_pool import BlockPool
from lora_jax.config import CacheConfig, SchedulerConfig
from tests.support import tiny
from tests.support.scheduler_sim import Simulation

SIZE = 4  # tokens a page


# ---- the pool ----
def pool_with(*labels: str | None, pages: int = 8) -> tuple[BlockPool, list[int]]:
    pool = BlockPool(pages)
    held = pool.allocate(len(labels))
    assert held is not None
    for page, label in zip(held, labels, strict=True):
        if label is not None:
            pool.label(page, label)
    return pool, held


def test_a_labelled_page_is_found_until_another_page_is_needed():
    pool, held = pool_with("a", "b", None, pages=5)
    pool.free(held)
    assert pool.num_free == 4 and pool.num_kept == 2
    assert pool.find("a") == held[0] and pool.find("c") is None
    pool.allocate(2)  # the free ones go first
    assert pool.find("a") and pool.find("b")
    assert pool.allocate(1) == [held[1]], "those named last go first"
    assert pool.find("b") is None and pool.find("a") == held[0]
    pool.check_integrity([[p] for p in range(1, 5) if p != held[0]])


def test_a_shared_page_is_free_when_its_last_holder_ends():
    pool, (page,) = pool_with("a")
    pool.share(page)
    pool.free([page])
    assert pool.num_kept == 0 and pool.allocate(8) is None
    pool.check_integrity([[page]])
    pool.free([page])
    assert pool.num_kept == 1
    with pytest.raises(AssertionError, match=f"page {page}"):
        pool.free([page])


def test_one_page_has_a_label_and_a_page_one_label():
    pool, (first, second) = pool_with("a", "a")
    assert pool.find("a") == first
    pool.label(first, "b")
    assert pool.find("b") is None
    pool.free([second])
    assert pool.num_kept == 0, "without a label nobody can find it"


def test_forgotten_pages_are_not_found():
    pool, held = pool_with("a", "b", "c")
    pool.free(held[1:])
    pool.forget([held[0], held[1]])
    assert [pool.find(label) for label in "abc"] == [None, None, held[2]] and pool.num_kept == 1
    pool.forget()
    assert pool.num_kept == 0 and pool.find("c") is None
    pool.free(held[:1])
    pool.check_integrity([])


@given(pages=st.integers(2, 9), moves=st.lists(st.tuples(st.sampled_from("afls!"), st.integers(0, 5)), max_size=60))
def test_any_sequence_matches_lists(pages: int, moves: list[tuple[str, int]]):
    """a: allocate n pages; f: free one of the holdings; l: label n; s: share what has label n; !: forget all."""
    pool, holdings, contents = BlockPool(pages), [], {}  # contents: page -> label
    for move, n in moves:
        held = Counter(page for holding in holdings for page in holding)
        if move == "a":
            got = pool.allocate(n)
            assert (got is None) == (n > pages - 1 - len(held))
            if got is not None:
                assert len(set(got)) == n and not set(got) & held.keys()
                for page in got:
                    contents.pop(page, None)
                holdings.append(got)
        elif move == "f" and n < len(holdings):
            pool.free(holdings.pop(n))
        elif move == "l" and holdings and holdings[0]:
            page = holdings[0][0]
            pool.label(page, n)
            if page not in contents and n not in contents.values():
                contents[page] = n
        elif move == "s":
            page = pool.find(n)
            assert (page is not None) == (n in contents.values())
            if page is not None:
                assert contents[page] == n
                pool.share(page)
                holdings.append([page])
        elif move == "!":
            pool.forget()
            contents.clear()
        pool.check_integrity(holdings)
        assert pool.num_free == pages - 1 - len({page for holding in holdings for page in holding})
        assert pool.num_kept == len(contents.keys() - {page for holding in holdings for page in holding})


# ---- the scheduler ----
def simulation(*, pages: int = 60, tokens: int = 64, seqs: int = 8, slots: int = 2, **config) -> Simulation:
    return Simulation(SchedulerConfig(seqs, tokens, 48, **config), CacheConfig(SIZE, pages), slots)


def starts(sim: Simulation) -> list[tuple[str, int, int]]:
    return [(row.request.request_id, row.start, row.num_tokens) for row in sim.step().rows]


def hits(sim: Simulation) -> tuple[int, int]:
    stats = sim.scheduler.stats()
    return stats.prefix_cache_queries, stats.prefix_cache_hits


def test_requests_of_one_step_share_what_the_first_computes():
    sim = simulation()
    for _ in range(3):
        sim.add(14, 2, common=10)
    assert starts(sim) == [("r0", 0, 14), ("r1", 8, 6), ("r2", 8, 6)]
    assert hits(sim) == (42, 16)
    first, *others = (r.pages for r in sim.requests)
    assert all(pages[:2] == first[:2] and not set(pages[2:]) & set(first) for pages in others)
    sim.run(20)
    sim.check_results()


def test_at_least_one_token_is_computed():
    sim = simulation()
    sim.add(8, 1, common=8)
    sim.run(9)
    sim.add(8, 1, common=8)
    assert starts(sim) == [("r1", 4, 4)]


def test_adapters_share_nothing_with_others():
    sim = simulation()
    for adapter in (None, "a", "b", "a"):
        sim.add(9, 2, adapter, common=9)
    assert starts(sim) == [("r0", 0, 9), ("r1", 0, 9), ("r2", 0, 9), ("r3", 8, 1)]
    sim.run(20)
    sim.check_results()


def test_a_conversation_goes_on_from_its_answer():
    sim = simulation()
    first = sim.add(6, 8)
    sim.run(20)
    following = sim.add(6, 3)
    following.token_ids[:] = following.prompt_token_ids[:] = [*first.token_ids, 1, 2]
    assert starts(sim) == [("r1", 12, 4)], "14 tokens, the last one of which was never computed"
    sim.run(20)
    sim.check_results()


def test_a_long_beginning_in_chunks_is_shared_as_far_as_it_is_planned():
    sim = simulation(tokens=8)
    sim.add(20, 2, common=20)
    assert starts(sim) == [("r0", 0, 8)]
    sim.add(20, 2, common=20)
    assert starts(sim) == [("r0", 8, 8)]
    assert starts(sim) == [("r0", 16, 4), ("r1", 16, 4)]


def test_one_step_lists_no_more_pages_than_it_has_room_for():
    sim = simulation(pages=400, seqs=32)
    sim.add(45, 1, common=44)
    sim.run(9)
    for _ in range(20):
        sim.add(45, 1, common=44)
    room = sim.cache.most_listed(sim.config)
    rows = [len(sim.step().rows) for _ in range(2)]
    assert rows[0] * 12 <= room < 20 * 12 and sum(rows) <= 20
    sim.run(50)
    sim.check_results()


def test_off_means_that_nothing_is_shared():
    sim = simulation(enable_prefix_caching=False)
    for _ in range(2):
        sim.add(9, 2, common=9)
        sim.run(9)
    assert [plan.rows[0].start for plan in sim.plans if plan.phase == "prefill"] == [0, 0]
    assert sim.scheduler.stats().cached_pages == 0 and hits(sim) == (18, 0)


def test_logprobs_of_the_prompt_are_computed_from_all_of_it():
    sim = simulation()
    for _ in range(2):
        request = sim.add(9, 1, common=9)
        request.params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        assert starts(sim)[0][1:] == (0, 9)
        sim.run(9)


def test_what_a_lost_cache_held_is_not_found():
    sim = simulation()
    sim.add(9, 2, common=9)
    sim.run(9)
    sim.scheduler.reset_running()
    assert sim.scheduler.stats().cached_pages == 0
    sim.add(9, 2, common=9)
    assert starts(sim) == [("r1", 0, 9)]


def test_what_a_broken_request_left_is_not_found():
    sim = simulation()
    broken = sim.add(9, 5, common=9)
    sim.step()
    sim.scheduler.finish(broken, "abort", broken=True)
    sim.check()
    sim.add(9, 2, common=9)
    assert starts(sim) == [("r1", 0, 9)]


# ---- the engine ----
GREEDY = dict(temperature=0.0, ignore_eos=True)
TOLERANCE = 1e-3  # logits, float32 with exact products


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: tiny.save_adapter(base, root / name, seed=i) for i, name in enumerate(("one", "two"), 1)}


@pytest.fixture(scope="module")
def llm(base) -> LLM:
    """Pages for about three of the requests below."""
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, page_size=4, num_pages=50)
    return LLM(str(base), enable_lora=True, max_loras=2, max_lora_rank=8, disable_tqdm=True, **sizes)


def test_answers_with_shared_beginnings_equal_transformers(llm, base, adapters):
    for name, path in adapters.items():
        llm.load_lora(name, str(path))
    rng, before = np.random.default_rng(0), llm.stats()
    common = rng.integers(3, tiny.VOCAB, 37).tolist()
    who = list(itertools.islice(itertools.cycle([None, "one", "two"]), 12))
    prompts = [
        {"prompt_token_ids": common[: 20 + 3 * (i % 6)] + rng.integers(3, tiny.VOCAB, 5).tolist()} for i in range(12)
    ]
    requests = [name and LoRARequest(name) for name in who]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, **GREEDY), lora_request=requests)
    stats = llm.stats()
    shared = stats["prefix_cache_hits"] - before["prefix_cache_hits"]
    computed = stats["prompt_tokens"] - before["prompt_tokens"]
    assert shared > 100 and computed + shared >= sum(len(p["prompt_token_ids"]) for p in prompts)
    oracles = {None: tiny.Oracle(base), **{name: tiny.Oracle(base, path) for name, path in adapters.items()}}
    for name, output in zip(who, outputs, strict=True):
        oracles[name].check_greedy(output, TOLERANCE)
    llm.engine.check_integrity()
    for name in adapters:
        llm.unload_lora(name)


def test_a_reset_cache_is_empty(llm):
    prompt = {"prompt_token_ids": list(range(50, 80))}
    params = SamplingParams(max_tokens=2, **GREEDY)
    (first,) = llm.generate([prompt], params)
    before = llm.stats()
    assert before["cached_pages"] > 0
    llm.reset_prefix_cache()
    (second,) = llm.generate([prompt], params)
    after = llm.stats()
    assert after["prefix_cache_hits"] == before["prefix_cache_hits"] and first.outputs == second.outputs
    llm.engine.check_integrity()


def test_other_weights_under_the_same_name_find_nothing(llm, adapters, tmp_path, base):
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["one"], folder)
    prompt = {"prompt_token_ids": list(range(3, 40))}
    ask = lambda: llm.generate([prompt], SamplingParams(max_tokens=4, **GREEDY), lora_request=LoRARequest("same"))  # noqa: E731
    llm.load_lora("same", str(folder))
    ask()
    before = llm.stats()["prefix_cache_hits"]
    ask()
    assert llm.stats()["prefix_cache_hits"] == before + 36
    shutil.rmtree(folder)
    shutil.copytree(adapters["two"], folder)
    llm.load_lora("same", str(folder), replace=True)
    (output,) = ask()
    assert llm.stats()["prefix_cache_hits"] == before + 36
    tiny.Oracle(base, adapters["two"]).check_greedy(output, TOLERANCE)
    llm.unload_lora("same")
