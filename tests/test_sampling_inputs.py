"""The host's part of sampling: modes, seeds, and the arrays of a step."""

from __future__ import annotations

import jax
import numpy as np

from lora_jax import sampling
from lora_jax.plan import ScheduledRow
from lora_jax.sampling_inputs import BANNED, STEP, TEMPERATURE, RowSettings, request_seed
from tests.support.sampling import SEQS, V, arrays, request, settings_of


def mode(requests, samples: bool = True) -> str | None:
    """Each request on the row of its place; None: a row without one."""
    settings, _, index = settings_of(requests, SEQS)
    rows = []
    for i, r in enumerate(requests):
        if r is not None:
            r.row = i
            rows.append(ScheduledRow(r, 0, 1, samples, int(index[i])))
    return settings.mode(rows)


def test_seeds_of_requests():
    seed = request_seed
    assert seed(request(seed=-1), 0) == 2**64 - 1
    assert seed(request(seed=5), 0) == seed(request(seed=5, id="x"), 1) == 5
    unseeded = {seed(request(id=i), e) for i in "ab" for e in (0, 1)}
    assert len(unseeded) == 4 and seed(request(id="a"), 0) in unseeded
    assert max(unseeded) >= 2**32  # both words are used


def test_modes():
    plain, sampled = request(temperature=0), request(temperature=0.5)
    assert mode([]) is mode([None, plain]) is None
    assert mode([plain, None, sampled]) == "full"
    assert mode([request(temperature=0, presence_penalty=0.1)]) == "full"
    assert mode([request(temperature=0, min_tokens=2, output=[1])]) == "full"
    assert mode([request(temperature=0, min_tokens=2, output=[1, 1])]) is None
    assert mode([plain, request(temperature=0, min_tokens=2), request(temperature=0, logprobs=1)]) == "logprobs"
    assert mode([sampled, request(temperature=0, logprobs=0), plain]) == "logprobs"
    assert mode([sampled, request(temperature=0, logprobs=0)], samples=False) is None, "a chunk before the prompt's end"


def test_warm_up_arrays_have_the_shapes_of_live_ones():
    empty, live = arrays([], 4), arrays([request(0), None, request(2, seed=2**63 - 1, min_tokens=1, eos=(3,))], 4)
    for name in empty:
        assert (empty[name].shape, empty[name].dtype) == (live[name].shape, live[name].dtype)
    assert (empty["floats"] == live["floats"][1]).all() and (empty["ints"] == live["ints"][1]).all()
    avals = sampling.state_avals(SEQS, V)
    live_avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), sampling.init_state(SEQS, V))
    assert jax.tree.map(lambda a, b: a == b, avals, live_avals) == (True, True)


def test_a_row_keeps_nothing_of_the_request_before():
    settings = RowSettings(2, V, 0)
    settings.put(
        1, request(temperature=1.0, seed=2**40, top_k=3, min_tokens=9, eos=(4, 5), logprobs=1, presence_penalty=1)
    )
    plain = request(1, temperature=0.0)
    settings.put(1, plain)
    fresh = RowSettings(2, V, 0)
    rows, index = np.array([1, 2], np.int32), np.zeros(2, np.int32)
    for mine, other in zip(settings.arrays(rows, index).values(), fresh.arrays(rows, index).values(), strict=True):
        assert (mine == other).all()
    assert settings.mode([ScheduledRow(plain, 0, 1, True, 0)]) is None


def test_the_arrays_of_a_step_in_flight_do_not_change():
    settings = RowSettings(1, V, 0)
    settings.put(0, request(temperature=0.5, min_tokens=2, eos=(7,)))
    rows = np.array([0], np.int32)
    first = settings.arrays(rows, np.array([1], np.int32))
    later = settings.arrays(rows, np.array([2], np.int32))
    settings.put(0, request(temperature=0.0))
    assert first["floats"][0, TEMPERATURE] == later["floats"][0, TEMPERATURE] == 0.5
    assert first["ints"][0, [STEP, BANNED]].tolist() == [1, 7] and later["ints"][0, [STEP, BANNED]].tolist() == [2, V]
