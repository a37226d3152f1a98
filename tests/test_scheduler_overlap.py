"""Plans made while the tokens of the one before are not known yet."""

from __future__ import annotations

import pytest

from lora_jax.plan import StepPlan
from lora_jax.request import Request
from tests.test_scheduler import shape, simulation


def made(sim) -> StepPlan:
    plan = sim.scheduler.plan()
    assert plan is not None
    sim.check()
    return plan


def test_a_plan_counts_tokens_that_are_not_known_yet():
    sim = simulation()
    request = sim.add(5, 4)
    first, second = made(sim), made(sim)
    assert shape(first) == [("r0", 0, 5, True)] and shape(second) == [("r0", 5, 1, True)]
    assert [plan.rows[0].index for plan in (first, second)] == [0, 1]
    assert (request.num_output, request.pending, request.num_sampled, request.num_computed) == (0, 2, 2, 6)
    assert sim.scheduler.resolve(first, {"r0": 7}) == [request] and request.pending == 1
    third = made(sim)
    assert shape(third) == [("r0", 6, 1, True)] and third.rows[0].index == 2
    assert len(request.pages) == 2


def test_nothing_is_planned_beyond_the_last_token():
    sim = simulation()
    request = sim.add(3, 2)
    first, second = made(sim), made(sim)
    sim.scheduler.resolve(first, {"r0": 7})
    assert sim.scheduler.plan() is None and sim.scheduler.has_unfinished()
    assert sim.scheduler.resolve(second, {"r0": 8}) == [request] and request.output_token_ids == [7, 8]


def test_nothing_is_planned_beyond_max_model_len():
    sim = simulation(model_len=10)
    sim.add(8, 100)
    first, second = made(sim), made(sim)
    assert shape(second) == [("r0", 8, 1, True)]
    sim.scheduler.resolve(first, {"r0": 7})
    assert sim.scheduler.plan() is None


def test_an_end_that_is_found_late_gives_everything_away_at_once():
    sim = simulation(seqs=1, pages=4, model_len=16, slots=1)
    old, new = sim.add(9, 5, "a"), sim.add(5, 3, "b")
    first, second = made(sim), made(sim)
    assert [row.request for row in second.rows] == [old]
    held = old.pages, old.row, old.slot
    (got,) = sim.scheduler.resolve(first, {"r0": 7})
    sim.scheduler.finish(got, "stop")
    sim.check()
    third = made(sim)
    assert [row.request for row in third.rows] == [new] and third.slot_writes == [(0, new.adapter)]
    assert new.row == held[1] and new.slot == held[2] and set(new.pages) & set(held[0])
    assert sim.scheduler.resolve(second, {"r0": 8}) == [] and old.output_token_ids == [7]
    assert sim.scheduler.resolve(third, {"r1": 9}) == [new]


def test_the_same_id_may_be_in_both_plans_in_flight():
    sim = simulation()
    old = sim.add(3, 5)
    first = made(sim)
    sim.scheduler.abort(old.request_id)
    new = Request(old.request_id, [1, 2], old.params, max_tokens=5)
    sim.scheduler.add(new)
    second = made(sim)
    assert sim.scheduler.resolve(first, {"r0": 7}) == [] and new.pending == 1
    assert sim.scheduler.resolve(second, {"r0": 8}) == [new] and new.output_token_ids == [8]


def test_a_preempted_request_waits_for_its_token_before_it_is_admitted():
    """Its tokens are computed again from those of the host. A chance to be admitted earlier needs luck with pages, so the
    preemption is called for here."""
    sim = simulation()
    request = sim.add(5, 4)
    plan = made(sim)
    sim.scheduler._requeue(request)
    sim.check()
    assert request.pending == 1 and sim.scheduler.plan() is None
    sim.scheduler.resolve(plan, {"r0": 7})
    again = made(sim)
    assert shape(again) == [("r0", 4, 2, True)] and again.rows[0].index == 1  # one page lies there still


@pytest.mark.parametrize("lag", [False, True])
def test_crowded_requests_are_preempted_with_and_without_a_token_in_flight(lag: bool):
    sim = simulation(pages=9, tokens=8, seqs=3, model_len=24)
    for prompt, output in ((8, 12), (6, 12), (5, 12), (2, 9)):
        sim.add(prompt, output)
    requeue, pending = sim.scheduler._requeue, set()
    sim.scheduler._requeue = lambda r: (pending.add(r.pending), requeue(r))[1]
    sim.run(200, lag=lag)
    sim.check_results()
    assert pending == {int(lag)}


def test_a_request_that_ends_in_flight_is_aborted_and_forgotten():
    sim = simulation()
    request = sim.add(3, 5)
    first, second = made(sim), made(sim)
    sim.scheduler.abort("r0")
    sim.check()
    assert request.pending == 0 and not sim.scheduler.has_unfinished()
    assert sim.scheduler.resolve(first, {}) == [] and sim.scheduler.plan() is None
    assert sim.scheduler.resolve(second, {}) == []
    assert request.output_token_ids == [] and sim.scheduler.stats().free_pages == 64


def test_reset_running_forgets_both_plans():
    sim = simulation()
    request = sim.add(3, 5)
    made(sim)
    plan = made(sim)
    sim.scheduler.reset_running()
    sim.check()
    assert request.pending == 0 and shape(made(sim)) == [("r0", 0, 3, True)]
    with pytest.raises(AssertionError, match="not the oldest"):
        sim.scheduler.resolve(plan, {"r0": 1})


def test_check_integrity_sees_a_wrong_count_of_pending_tokens():
    sim = simulation()
    request = sim.add(3, 5)
    made(sim)
    request.pending, request.num_computed = 0, 2
    with pytest.raises(AssertionError, match="pending.*r0"):
        sim.check()
