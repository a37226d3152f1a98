"""The scheduler against requests that run alone: whatever is batched, cut, preempted, aborted, lost or known late, the tokens
agree."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.config import CacheConfig, SchedulerConfig
from tests.support.scheduler_sim import Rates, Simulation

arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps after the previous one
        st.integers(1, 24),  # prompt tokens
        st.integers(1, 8),  # max_tokens
        st.sampled_from([None, "a", "b", "c", "d"]),
        st.sampled_from([0, 0, 3, 9, 24]),  # tokens that all prompts begin with
    ),
    min_size=1,
    max_size=14,
)
events = st.dictionaries(
    st.integers(0, 40),  # step
    st.tuples(st.sampled_from(["abort", "abort in flight", "dispatch", "read"]), st.integers(0, 13)),
    max_size=6,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    arrivals=arrivals,
    events=events,
    seqs=st.integers(1, 6),
    tokens=st.sampled_from([1, 3, 8, 16, 40]),
    spare_pages=st.integers(0, 12),
    page_size=st.sampled_from([1, 2, 4, 8]),
    slots=st.integers(1, 3),
    lags=st.one_of(st.just([True]), st.lists(st.booleans(), min_size=1, max_size=5)),
    broken=st.sampled_from([0, 11]),
    prefix_caching=st.sampled_from([True, True, False]),
    loads=st.sampled_from([0, 0, 1, 3]),
)
def test_every_request_gets_what_it_gets_alone(
    arrivals, events, seqs, tokens, spare_pages, page_size, slots, lags, broken, prefix_caching, loads
):
    model_len = 40
    longest = max(prompt + output for _, prompt, output, *_ in arrivals)
    pages = 1 + -(-longest // page_size) + spare_pages
    config = SchedulerConfig(seqs, tokens, model_len, enable_prefix_caching=prefix_caching)
    sim = Simulation(config, CacheConfig(page_size, pages), slots, Rates(23, broken), loads)
    clock, due = 0, []
    for delay, *request in arrivals:
        clock += delay
        due.append((clock, request))
    step = 0
    while due or step <= max(events, default=0):
        while due and due[0][0] <= step:
            sim.add(*due.pop(0)[1])
        kind, which = events.get(step, ("", 0))
        if kind == "abort":
            sim.scheduler.abort(f"r{which}")
            sim.check()
        sim.try_step(
            abort_in_flight=f"r{which}" if kind == "abort in flight" else None,
            fail=kind if kind in ("dispatch", "read") else "",
            lag=lags[step % len(lags)],
        )
        step += 1
    sim.run(sim.step_bound(), lag=lags[0])
    sim.check_results()
