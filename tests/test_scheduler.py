"""The scheduler's rules, one by one. test_scheduler_simulation.py mixes them all."""

from __future__ import annotations

import random

import pytest

from lora_jax.config import CacheConfig, SchedulerConfig
from lora_jax.request import Request, SamplingParams
from lora_jax.step_keys import StepKey
from tests.support.scheduler_sim import Simulation

PAGE = 4


def simulation(
    *,
    seqs: int = 4,
    tokens: int = 16,
    pages: int = 64,
    model_len: int = 64,
    slots: int = 0,
    page_size: int = PAGE,
) -> Simulation:
    """pages: those that can be used, so without the trash page."""
    return Simulation(SchedulerConfig(seqs, tokens, model_len), CacheConfig(page_size, pages + 1), slots)


def shape(plan) -> list[tuple[str, int, int, bool]]:
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


# -- prefill --


def test_prompts_share_a_prefill_step_and_only_the_last_is_cut():
    sim = simulation(tokens=16)
    for prompt in (5, 7, 9):
        sim.add(prompt, 2)
    plan = sim.step()
    assert shape(plan) == [("r0", 0, 5, True), ("r1", 0, 7, True), ("r2", 0, 4, False)]
    assert plan.key == StepKey("prefill", 16, lora=False)
    plan = sim.step()
    assert plan.phase == "decode" and [r[0] for r in shape(plan)] == ["r0", "r1"]
    sim.add(3, 2)
    assert shape(sim.step()) == [("r2", 4, 5, True), ("r3", 0, 3, True)]


def test_a_long_prompt_is_cut_and_alternates_with_decode():
    sim = simulation(tokens=8, seqs=2)
    sim.add(3, 8)
    sim.step()
    sim.add(25, 2)
    plans = [sim.step() for _ in range(9)]
    assert [plan.phase for plan in plans] == ["decode", "prefill"] * 4 + ["decode"]
    chunks = [row for plan in plans[1::2] for row in shape(plan)]
    assert chunks == [("r1", 0, 8, False), ("r1", 8, 8, False), ("r1", 16, 8, False), ("r1", 24, 1, True)]
    assert [len(plan.rows) for plan in plans[::2]] == [1, 1, 1, 1, 2]


def test_max_prefill_seqs_bounds_a_prefill_step():
    sim = simulation(seqs=70, tokens=128, pages=400)
    for _ in range(70):
        sim.add(1, 4)
    assert sim.config.max_prefill_seqs == 64
    assert len(sim.step().rows) == 64
    assert sim.step().phase == "decode"
    assert len(sim.step().rows) == 6
    assert len(sim.step().rows) == 70


def test_the_queue_is_looked_at_again_after_a_prefill_step_without_room():
    """The last chunk of r0 takes the whole budget: that must not count as "nobody can be admitted"."""
    sim = simulation(tokens=8)
    sim.add(16, 20)
    sim.add(2, 1)
    assert [shape(sim.step())[0][0] for _ in range(4)] == ["r0", "r0", "r0", "r1"]


# -- pages --


def test_a_request_enters_only_with_pages_to_spare_for_the_running_ones():
    sim = simulation(pages=4, model_len=12)
    sim.add(4, 7)
    sim.step()
    sim.add(8, 2)
    sim.run(20)
    assert sim.admissions == ["r0", "r1"] and not sim.preempted
    sim.check_results()


@pytest.mark.parametrize(("max_tokens", "preemptions"), [(5, 0), (10, 1)])
def test_a_partial_prefill_waits_for_pages_of_older_requests_and_yields_its_own(max_tokens: int, preemptions: int):
    sim = simulation(tokens=4, pages=18, model_len=18, page_size=1)
    sim.add(4, max_tokens)
    sim.step()
    sim.add(12, 2)
    phases = [sim.step().phase for _ in range(6)]
    assert phases == ["decode", "prefill"] * 2 + ["decode", "decode"], "r1 has 8 pages, needs 4 more, 3 are free"
    sim.run(60)
    assert sim.preempted["r1"] == preemptions
    sim.check_results()


def test_a_partial_prefill_takes_pages_from_later_requests():
    sim = simulation(tokens=4, pages=16, model_len=16, page_size=1, slots=1)
    sim.add(1, 3, "a")
    partial = sim.add(12, 2, "b")
    sim.add(1, 12)
    while not partial.num_output:
        sim.step()
    assert sim.admissions == ["r0", "r2", "r1"]
    assert dict(sim.preempted) == {"r2": 1}
    sim.run(60)
    sim.check_results()


def test_the_end_of_a_waiting_request_lets_the_next_one_in():
    sim = simulation(pages=6, model_len=24)
    sim.add(8, 12)
    sim.step()
    large, small = sim.add(20, 2), sim.add(1, 9)
    sim.step()
    sim.step()
    assert large.row == small.row == -1
    sim.scheduler.abort(large.request_id)
    sim.step()
    assert small.row >= 0


# -- order --


def test_without_adapters_admission_is_in_order_of_arrival():
    sim = simulation(seqs=3, tokens=8, pages=100)
    for i in range(9):
        sim.add(1 + 5 * i % 11, 1 + i % 3)
    sim.run(sim.step_bound())
    assert sim.admissions == [f"r{i}" for i in range(9)]


def test_a_small_request_does_not_pass_a_large_one_that_waits_for_pages():
    sim = simulation(pages=6, model_len=24)
    sim.add(8, 8)
    sim.step()
    sim.add(20, 2)
    sim.add(1, 1)
    sim.run(100)
    assert sim.admissions == ["r0", "r1", "r2"]
    sim.check_results()


def test_preemption_takes_the_latest_and_keeps_its_tokens():
    sim = simulation(pages=6, tokens=32, seqs=2, model_len=24)
    old, new = sim.add(8, 12), sim.add(6, 12)
    while not sim.preempted:
        sim.step()
    assert dict(sim.preempted) == {new.request_id: 1} and sim.scheduler.stats().preemptions == 1
    assert old.row >= 0 and new.row == -1 and new.pages == [] and new.num_output > 0
    had = new.num_output
    plan = sim.step()
    while new.row < 0:
        plan = sim.step()
    assert shape(plan)[-1] == (new.request_id, 4, 2 + had, True), "all but a whole page that nobody has taken since"
    sim.run(100)
    sim.check_results()


def test_a_preempted_request_goes_before_later_arrivals():
    sim = simulation(pages=6, tokens=32, seqs=2, model_len=24)
    for prompt, output in ((8, 12), (6, 12), (2, 2)):
        sim.add(prompt, output)
    sim.run(200)
    assert sim.preempted["r1"] >= 1
    assert sim.admissions.index("r2") > len(sim.admissions) - 1 - sim.admissions[::-1].index("r1")
    sim.check_results()


# -- adapters --


def test_the_lora_variant_follows_the_scheduled_requests():
    sim = simulation(slots=2, seqs=4)
    sim.add(3, 2)
    assert sim.step().key == StepKey("prefill", 16, lora=False)
    sim.add(2, 5, "a")
    assert sim.step().key == StepKey("decode", 1, lora=False)
    plan = sim.step()
    assert plan.key == StepKey("prefill", 16, lora=True) and plan.slot_writes == [(0, sim.requests[1].adapter)]
    assert sim.step().key.lora


def test_an_adapter_is_written_once_for_all_its_requests():
    sim = simulation(slots=2, seqs=4)
    for adapter in ("a", "b", "a", "b"):
        sim.add(2, 4, adapter)
    plan = sim.step()
    assert [adapter.name for _, adapter in plan.slot_writes] == ["a", "b"]
    assert [row.request.slot for row in plan.rows] == [0, 1, 0, 1]
    sim.add(2, 1, "a")
    sim.run(100)
    assert not any(plan.slot_writes for plan in sim.plans[1:])


def test_base_and_resident_requests_pass_one_that_waits_for_a_slot():
    sim = simulation(slots=1, seqs=4)
    sim.add(2, 9, "a")
    sim.step()
    sim.add(2, 1, "b")
    sim.add(2, 9, "a")
    sim.add(2, 9)
    sim.step()
    sim.step()
    assert sim.admissions == ["r0", "r2", "r3"]
    sim.run(100)
    sim.check_results()


@pytest.mark.parametrize("others", [["a"], ["a", None], ["a", "a", None, "c"]])
def test_no_adapter_waits_for_ever(others: list[str | None]):
    """A stream of requests that would keep the only slot held: "b" gets in after at most max_num_seqs passes."""
    sim = simulation(slots=1, seqs=4)
    for i in range(3):
        sim.add(2, 6 + i, "a")
    sim.step()
    waits = sim.add(2, 3, "b")
    for i in range(300):
        if waits.row >= 0:
            break
        sim.add(2, 4, others[i % len(others)])
        sim.step()
    passed = [r for r in sim.admissions if r not in ("r0", "r1", "r2", waits.request_id)]
    by_adapters = [r for r in passed if sim.requests[int(r[1:])].adapter]
    assert waits.row >= 0, f"passed {len(passed)} times"
    assert 1 <= len(by_adapters) <= 4
    sim.run(sim.step_bound())
    sim.check_results()


def test_passes_are_counted_within_one_plan_too():
    sim = simulation(slots=1, seqs=4)
    sim.add(2, 30, "a")
    sim.step()
    waits = sim.add(2, 3, "b")
    for _ in range(6):
        sim.add(2, 1, "a")
    sim.add(2, 1)
    for _ in range(6):
        sim.step()
    assert sim.admissions == ["r0", "r2", "r3", "r4", "r5", "r8"], "four pass with the adapter, then only the base"
    sim.scheduler.abort(waits.request_id)
    sim.step()
    sim.step()
    assert sim.admissions[-2:] == ["r6", "r7"], "nobody lacks a slot any more, so nothing drains"
    sim.run(100)
    sim.check_results()


@pytest.mark.parametrize("seed", [5, 7, 11, 12])  # where choosing anew at each look would let all three pass
def test_the_choice_of_the_draining_adapter_is_kept(seed: int):
    """Streams in which now one, now another adapter has the fewest running requests. The simulation checks the rule."""
    draw = random.Random(seed)
    sim = simulation(slots=3, seqs=8, pages=200)
    for adapter in "aabbcc":
        sim.add(2, draw.randint(5, 20), adapter)
    sim.step()
    waits = sim.add(2, 3, "d")
    while waits.row < 0:
        for adapter in draw.sample("abc", 3):
            sim.add(1, draw.randint(1, 6), adapter)
        sim.step()
    sim.run(sim.step_bound())
    sim.check_results()


def test_passes_are_counted_for_each_request_anew():
    sim = simulation(slots=1, seqs=4)
    sim.add(2, 60, "a")
    sim.step()
    for adapter in ("b", "a", "a", "c", "a", "a"):
        sim.add(2, 1, adapter)
    while len(sim.admissions) < 5:
        sim.step()
    sim.scheduler.abort("r1")
    for _ in range(4):
        sim.add(2, 1, "a")
    for _ in range(8):
        sim.step()
    assert sim.admissions[5:] == ["r7", "r8", "r9", "r10"], "they pass r4, which begins with none"


def test_one_adapter_drains_and_the_others_keep_passing():
    """Streams of "a" and "b" hold both slots; "c" waits. "b" has fewer running requests, so it drains."""
    sim = simulation(slots=2, seqs=6)
    for adapter, max_tokens in (("a", 40), ("a", 40), ("b", 12)):
        sim.add(2, max_tokens, adapter)
    sim.step()
    waits = sim.add(2, 3, "c")
    while waits.row < 0:
        sim.add(1, 2, "a")
        sim.add(1, 2, "b")
        sim.step()
    order = [sim.requests[int(name[1:])].adapter.name for name in sim.admissions[3:]]
    late = order[6 : order.index("c")]
    assert len(late) > 2 and set(late) == {"a"}, order
    assert sim.slots and not sim.slots.resident(sim.adapters["b"])
    sim.run(sim.step_bound())
    sim.check_results()


# -- ends --


def test_abort_frees_everything_at_once_and_tells_whether_there_was_one():
    sim = simulation(slots=1)
    running, waiting = sim.add(9, 5, "a"), sim.add(3, 5, "b")
    sim.step()
    assert sim.scheduler.stats().running == 1 and sim.scheduler.stats().waiting == 1
    for request in (running, waiting):
        assert sim.scheduler.abort(request.request_id) is request
        assert request.finish_reason == "abort" and request.pages == [] and request.row == request.slot == -1
        assert sim.scheduler.abort(request.request_id) is None
    assert not sim.scheduler.has_unfinished() and sim.scheduler.unfinished() == []
    assert sim.scheduler.plan() is None
    sim.check_results()


def test_an_id_used_again_while_its_old_step_runs_gets_no_foreign_token():
    sim = simulation()
    old = sim.add(3, 5)
    plan = sim.scheduler.plan()
    sim.scheduler.abort(old.request_id)
    new = Request(old.request_id, [1, 2], SamplingParams())
    sim.scheduler.add(new)
    assert plan is not None and sim.scheduler.resolve(plan, {old.request_id: 7}) == []
    assert new.token_ids == [1, 2] and new.num_computed == 0


def test_reset_running_queues_all_again_in_order():
    sim = simulation(slots=2)
    for adapter in ("a", None, "b"):
        sim.add(4, 4, adapter)
    sim.step()
    plan = sim.scheduler.plan()
    assert plan is not None
    assert [r.request_id for r in sim.scheduler.reset_running()] == ["r0", "r1", "r2"]
    sim.check()
    assert sim.scheduler.stats().running == 0 and sim.scheduler.stats().preemptions == 0
    plan = sim.scheduler.plan()
    assert plan is not None and shape(plan) == [(f"r{i}", 0, 5, True) for i in range(3)]


# -- misuse --


def test_never_fits_names_the_limit():
    sim = simulation(pages=3, model_len=64)
    assert sim.scheduler.never_fits(12) is None
    assert "num_pages" in (sim.scheduler.never_fits(13) or "")
    assert "max_model_len=64" in (sim.scheduler.never_fits(65) or "")


def test_misuse_is_a_broken_invariant():
    sim = simulation(pages=3)
    request = sim.add(3, 2)
    with pytest.raises(AssertionError, match="r0.*in use"):
        sim.scheduler.add(Request("r0", [1], SamplingParams()))
    with pytest.raises(AssertionError, match="LoRA is off"):
        sim.scheduler.add(Request("x", [1], SamplingParams(), adapter="a"))
    with pytest.raises(AssertionError, match="no tokens"):
        sim.scheduler.add(Request("x", [], SamplingParams()))
    with pytest.raises(AssertionError, match="num_pages"):
        sim.scheduler.add(Request("x", [1] * 12, SamplingParams()))
    plan = sim.scheduler.plan()
    assert plan is not None
    younger = sim.scheduler.plan()
    assert younger is not None
    with pytest.raises(AssertionError, match="two plans in flight"):
        sim.scheduler.plan()
    with pytest.raises(AssertionError, match="not the oldest"):
        sim.scheduler.resolve(younger, {"r0": 1})
    with pytest.raises(AssertionError, match="r0"):
        sim.scheduler.resolve(plan, {})
    sim.scheduler.finish(request, "stop")
    with pytest.raises(AssertionError, match="not scheduled"):
        sim.scheduler.finish(request, "stop")


def test_check_integrity_sees_a_lost_page_a_shared_row_and_a_wrong_slot():
    for field, value in (("pages", [1]), ("row", 1), ("slot", 0), ("num_computed", 9)):
        sim = simulation()
        sim.add(5, 5)
        sim.add(5, 5)
        sim.step()
        sim.scheduler.check_integrity()
        setattr(sim.requests[0], field, value)
        with pytest.raises(AssertionError):
            sim.scheduler.check_integrity()
