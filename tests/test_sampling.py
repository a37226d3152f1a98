"""sampling.py against an independent float64 implementation, transformers, and exact probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lora_jax import sampling, sampling_inputs
from lora_jax.errors import RequestError
from lora_jax.request import Request, SamplingParams
from tests.support.sampling import SEQS, V, arrays, request, rows_of, settings_of

K = 5
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

_full = jax.jit(sampling.sample_full)
_logprobs = jax.jit(sampling.sample_logprobs, static_argnames="max_logprobs")
_reset = jax.jit(sampling.reset_row)


def full(logits, requests, state=None, bucket: int = SEQS):
    """(tokens, state) of a padded batch."""
    vocab = logits.shape[1]
    last, rows = sampling.init_last_tokens(SEQS), rows_of(requests, bucket)
    state = state_of(requests, vocab) if state is None else state
    tokens, _, state = _full(logits, last, rows, state, arrays(requests, bucket, vocab))
    return tokens, state


def greedy(logits) -> list[int]:
    rows = np.full(len(logits), SEQS, np.int32)
    return jax.jit(sampling.sample_greedy)(logits, sampling.init_last_tokens(SEQS), rows)[0].tolist()


def state_of(requests, vocab: int = V) -> sampling.SamplingState:
    state = sampling.init_state(SEQS, vocab)
    for r in requests:
        if r is not None:
            state = _reset(state, *sampling_inputs.reset_arrays(r, 32, vocab))
    return state


def pad(logits, bucket: int = SEQS):
    """One shape for most tests, so that little is compiled: rows beyond the given ones hold something else."""
    other = np.random.default_rng(9).normal(size=(bucket - len(logits), logits.shape[1]))
    return np.concatenate([np.asarray(logits), other.astype(logits.dtype)])


def run(requests, logits, bucket: int = SEQS) -> np.ndarray:
    """The tokens of requests with fresh state."""
    return np.asarray(full(pad(logits, bucket), requests, bucket=bucket)[0])[: len(requests)]


# ---- the independent implementation: one row, float64, sets of ids


def reference_logits(x: np.ndarray, r: Request) -> np.ndarray:
    x, p = x.astype(np.float64).copy(), r.params
    for t in range(len(x)):
        n = r.output_token_ids.count(t)
        if n or t in r.prompt_token_ids:
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        x[t] -= p.frequency_penalty * n + (p.presence_penalty if n else 0)
    if r.num_output < p.min_tokens:
        x[[*r.eos_token_ids, *(p.stop_token_ids or ())]] = -np.inf
    return x


def reference_probs(x: np.ndarray, r: Request) -> np.ndarray:
    p = r.params
    x = reference_logits(x, r) / p.temperature
    probs = np.exp(x - x.max())
    keep = {t for t in range(len(x)) if probs[t] >= p.min_p * probs.max()}
    if p.top_k > 0:
        kth = sorted((probs[t] for t in range(len(x)) if t in keep), reverse=True)[: p.top_k][-1]
        keep = {t for t in keep if probs[t] >= kth}
    total, used, nucleus = sum(probs[t] for t in keep), 0.0, set()
    for t in sorted(keep, key=lambda t: (-probs[t], t)):
        if used >= p.top_p * total and nucleus:
            break
        nucleus.add(t)
        used += probs[t]
    out = np.where([t in nucleus for t in range(len(x))], probs, 0)
    return out / out.sum()


def device_logits(x: np.ndarray, requests) -> np.ndarray:
    """What the device adds noise to: penalised, scaled and filtered logits."""
    vocab = x.shape[1]
    state, rows = state_of(requests, vocab), rows_of(requests, SEQS)
    out = _before_noise(pad(x.astype(np.float32)), rows, state, arrays(requests, SEQS, vocab))
    return np.asarray(out)[: len(x)]


@jax.jit
def _before_noise(x, rows, state, batch):
    floats, ints = batch["floats"], batch["ints"]
    out = sampling._penalised(x, rows, state, floats, ints)
    return sampling._filtered(out / jnp.where(floats[:, :1] > 0, floats[:, :1], 1), floats, ints)


def test_penalised_argmax_equals_the_reference():
    rng = np.random.default_rng(0)
    rows = []
    for i in range(8):
        prompt, output = rng.integers(0, V, 6).tolist(), rng.integers(0, V, 9).tolist() * 2
        penalties = ([1.0, 1.7, 0.6][i % 3], [0.0, 1.5][i % 2], i / 4 - 1)
        rows.append(request(i, prompt, output, temperature=0, **dict(zip(PENALTIES, penalties, strict=True))))
    logits = rng.normal(size=(8, V)).astype(np.float32)
    want = [reference_logits(x, r) for x, r in zip(logits, rows, strict=True)]
    assert run(rows, logits).tolist() == [int(x.argmax()) for x in want]
    sampled = [request(r.row, r.prompt_token_ids, r.output_token_ids, **_penalties(r)) for r in rows]
    np.testing.assert_allclose(device_logits(logits, sampled), want, atol=1e-5)


def _penalties(r: Request) -> dict[str, float]:
    return {name: getattr(r.params, name) for name in PENALTIES}


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.6},
    {"min_p": 0.05, "top_k": 20, "top_p": 0.8, "temperature": 0.5, "repetition_penalty": 1.3},
    {"temperature": 3.0, "top_k": -1},
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_filters_keep_what_the_reference_keeps(ties):
    rng = np.random.default_rng(1)
    for start in range(0, len(FILTERS), SEQS):
        rows = [request(i, **p) for i, p in enumerate(FILTERS[start : start + SEQS])]
        logits = rng.normal(size=(len(rows), V), scale=2)
        logits = np.round(logits).astype(np.float32) if ties else logits.astype(np.float32)
        got = device_logits(logits, rows)
        for x, y, r in zip(logits, got, rows, strict=True):
            want = reference_probs(x, r)
            assert np.flatnonzero(np.isfinite(y)).tolist() == np.flatnonzero(want).tolist(), r.params
            np.testing.assert_allclose(np.exp(y) / np.exp(y).sum(), want, atol=1e-5)


def test_filters_equal_those_of_transformers():
    import torch
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(2)
    cases = [
        ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [hf.TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [hf.MinPLogitsWarper(0.1)]),
        ({"repetition_penalty": 1.4}, [hf.RepetitionPenaltyLogitsProcessor(1.4)]),
        (
            {"repetition_penalty": 0.7, "temperature": 1.5, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
            [
                hf.RepetitionPenaltyLogitsProcessor(0.7),
                hf.TemperatureLogitsWarper(1.5),
                hf.MinPLogitsWarper(0.02),
                hf.TopKLogitsWarper(30),
                hf.TopPLogitsWarper(0.9),
            ],
        ),
    ]
    for params, processors in cases:
        rows = [request(i, rng.integers(0, V, 5), rng.integers(0, V, 5).tolist(), **params) for i in range(4)]
        logits = rng.normal(size=(4, V), scale=2).astype(np.float32)
        scores = torch.tensor(logits)
        for process in processors:
            scores = process(torch.tensor([r.token_ids for r in rows]), scores)
        np.testing.assert_allclose(device_logits(logits, rows), scores.numpy(), atol=1e-5, err_msg=str(params))


def test_draws_follow_the_probabilities():
    """Chi-square over many seeds, and over the successive steps of one seed. Seeds are fixed, so this can't flicker."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=20, scale=1.0).astype(np.float32)
    n = 4096
    x = np.tile(x, (n, 1))
    for params in ({}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 6, "min_p": 0.01, "repetition_penalty": 1.5}):
        want = reference_probs(x[0], request(0, **params))
        rows = [request(0, seed=s, **params) for s in range(n)]
        state = state_of(rows[:1], 20)
        by_seed = np.asarray(full(x, rows, state, n)[0])
        settings, places, _ = settings_of([request(0, seed=7, **params)] * n, n, 20)
        batch = settings.arrays(places, np.arange(n, dtype=np.int32))
        last = sampling.init_last_tokens(SEQS)
        by_step = np.asarray(_full(x, last, rows_of(rows, n), state, batch)[0])
        for draws in (by_seed, by_step):
            counts = np.bincount(draws, minlength=20)
            assert counts[want == 0].sum() == 0
            kept = want > 0
            assert stats.chisquare(counts[kept], want[kept] * n).pvalue > 1e-3, (params, counts)


def test_noise_is_fine_grained_and_finite():
    batch = arrays([request(0, seed=s) for s in range(64)], 64, 20000)
    noise = np.asarray(sampling._gumbel(jnp.asarray(batch["ints"]), 20000))
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel()[::8], "gumbel_r").pvalue > 1e-3
    top = np.sort(noise.ravel())[-20000:]
    assert len(np.unique(top)) > 19900  # 23-bit uniforms would give about a third of that


def test_a_draw_depends_on_seed_and_step_only():
    rng = np.random.default_rng(4)
    vocab = 500
    x = rng.normal(size=(1, vocab)).astype(np.float32)
    mine = {"seed": 2**40 + 5, "output": (5, 6, 5), "temperature": 1.1, "frequency_penalty": 0.3}
    alone = run([request(0, **mine)], x, bucket=1)[0]
    neighbours: list[Request | None] = [
        request(1, temperature=0),
        request(2, top_p=0.5, top_k=3, seed=1),
        None,
        request(4, repetition_penalty=1.5, min_tokens=3, eos=(7,), id="other"),
    ]
    for place in range(5):
        rows = [*neighbours[:place], request(5, **mine), *neighbours[place:]]
        for bucket in (5, 8):
            logits = rng.normal(size=(5, vocab)).astype(np.float32)
            logits[place] = x
            assert run(rows, logits, bucket)[place] == alone
    others = {
        "seed": run([request(0, **{**mine, "seed": 2**41 + 5})], x)[0],  # differs in the high word alone
        "low": run([request(0, **{**mine, "seed": 2**40 + 6})], x)[0],
        "step": run([request(0, **{**mine, "output": (5, 6, 5, 499)})], x)[0],
    }
    assert all(token != alone for token in others.values()), others


def test_filtered_neighbours_do_not_change_a_rows_bits():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(2, V)).astype(np.float32)
    mine = request(0, temperature=0.8, seed=3)
    plain = device_logits(logits, [mine, request(1)])
    mixed = device_logits(logits, [mine, request(1, [5], [6], top_p=0.3, top_k=4, min_p=0.1, presence_penalty=1.0)])
    assert plain[0].tobytes() == mixed[0].tobytes()
    assert plain[1].tobytes() != mixed[1].tobytes()


def test_greedy_takes_the_lowest_of_equals_in_every_mode():
    logits = np.zeros((3, V), np.float32)
    logits[0, [40, 9]] = 2.0
    logits[2] = -1e30
    want = [9, 0, 0]
    assert greedy(logits) == greedy(logits.astype(jnp.bfloat16)) == want
    assert run([request(i, temperature=0) for i in range(3)], logits).tolist() == want
    assert run([request(i, temperature=1e-6) for i in range(3)], logits).tolist() == want


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_a_broken_row_fails_alone(bad):
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(4, V)).astype(np.float32)
    rows = [request(i, temperature=t, seed=i) for i, t in enumerate((0, 1, 1, 0))]
    good = run(rows, logits)
    logits[1, 30] = logits[3, 50] = bad
    assert run(rows, logits).tolist() == [good[0], -1, good[2], -1]
    assert greedy(logits) == [logits[0].argmax(), -1, logits[2].argmax(), -1]
    state = state_of(rows)
    after = full(pad(logits), rows, state)[1]
    assert np.asarray(after.output_counts)[:4].sum(1).tolist() == [1, 0, 1, 0]
    assert greedy(np.full((1, V), -np.inf, np.float32)) == greedy(np.full((1, 1), -np.inf, np.float32)) == [-1]
    held_back = np.full((3, V), -np.inf, np.float32)
    held_back[:2, 5] = -7.0
    held_back[1, 60] = bad
    assert greedy(held_back) == [5, -1, -1]


def test_greedy_chooses_by_the_logits_that_the_program_returns():
    """Rounded ones: inside a program XLA may keep more bits than bfloat16 has, and then ties are none."""
    rng = np.random.default_rng(10)
    hidden, head = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((64, 32), (32, 512)))

    @jax.jit
    def step(hidden, head):
        logits = hidden @ head
        return logits, sampling.sample_greedy(logits, sampling.init_last_tokens(64), jnp.arange(64))[0]

    logits, tokens = step(hidden, head)
    assert tokens.tolist() == np.asarray(logits, np.float32).argmax(-1).tolist()


def test_min_tokens_holds_back_end_tokens():
    logits = np.zeros((3, V), np.float32)
    logits[:, 7], logits[:, 8], logits[:, 9] = 3.0, 2.0, 1.0
    params = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [8, 10**6, -56], "eos": (7,)}  # -56 + 64 == 8
    rows = [request(i, output=[1] * i, **params) for i in range(3)]
    assert run(rows, logits).tolist() == [9, 9, 7]
    assert run([request(0, temperature=0, min_tokens=1, stop_token_ids=[-57])], logits[:1]).tolist() == [7]
    sampled = [request(i, output=[1] * i, **{**params, "temperature": 1.0}) for i in range(3)]
    assert np.isneginf(device_logits(logits, sampled)[:, [7, 8]]).tolist() == [[True, True], [True, True], [False] * 2]
    with pytest.raises(RequestError, match="at most 16 end tokens, this request has 18"):
        sampling_inputs.banned_ids(SamplingParams(min_tokens=1, stop_token_ids=list(range(17))), frozenset({99}))
    assert sampling_inputs.banned_ids(SamplingParams(stop_token_ids=list(range(17))), frozenset()) == []


def test_state_counts_what_was_sampled():
    """Ten steps of a penalised request equal the same steps with the state rebuilt each time, as after preemption."""
    rng = np.random.default_rng(7)
    r = request(3, temperature=0, frequency_penalty=0.9, repetition_penalty=1.2)
    filler = request(2, prompt=[9], temperature=1.0, seed=1)
    state = state_of([r, filler])
    x = rng.normal(size=V).astype(np.float32)
    for _ in range(10):
        logits = np.stack([rng.normal(size=V).astype(np.float32), x, x])
        tokens, state = full(pad(logits), [filler, r], state)
        assert tokens[1] == run([r], x[None])[0] == reference_logits(x, r).argmax()
        r.token_ids.append(int(tokens[1]))
        filler.token_ids.append(int(tokens[0]))
    fresh = state_of([r, filler])
    for row in (2, 3):  # row 8, of padding, may hold anything
        np.testing.assert_array_equal(state.output_counts[row], fresh.output_counts[row])
    assert len(set(r.output_token_ids)) > 3


def test_reset_replaces_what_the_row_held_and_no_other():
    old = request(1, prompt=[4, 5], output=[6, 6, V - 1])
    state = state_of([old, request(2, prompt=[9], output=[8])])
    state = _reset(state, *sampling_inputs.reset_arrays(request(1, prompt=[7, 7], output=[3, 3]), 32, V))
    seen, counts = np.asarray(state.prompt_seen), np.asarray(state.output_counts)
    assert np.argwhere(seen).tolist() == [[1, 7], [2, 9]]
    assert [(int(i), int(j), int(counts[i, j])) for i, j in np.argwhere(counts)] == [(1, 3, 2), (2, 8, 1)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_logprobs_are_those_of_the_raw_logits(dtype):
    rng = np.random.default_rng(8)
    logits = jnp.asarray(rng.normal(size=(3, V), scale=3), dtype)
    rows = [
        request(0, temperature=0.0, logprobs=2),
        request(1, output=[1], seed=4, temperature=5.0, repetition_penalty=1.5, presence_penalty=1.0, top_p=0.99),
        request(2, temperature=0.0, presence_penalty=2.0, output=[int(jnp.argmax(logits[2]))]),
    ]
    batch, state = arrays(rows, SEQS), state_of(rows)
    args = (pad(logits), sampling.init_last_tokens(SEQS), rows_of(rows, SEQS), state, batch)
    tokens, kept, after, got = _logprobs(*args, max_logprobs=K)
    plain, plain_kept, plain_after = _full(*args)
    assert tokens.tolist() == plain.tolist() and kept.tolist() == plain_kept.tolist()
    np.testing.assert_array_equal(after.output_counts, plain_after.output_counts)
    x = np.asarray(logits, np.float64)
    want = x - np.log(np.exp(x).sum(-1, keepdims=True))
    for i, token in enumerate(tokens[:3].tolist()):
        order = np.argsort(-x[i], kind="stable")[:K]
        assert got.top_ids[i].tolist() == order.tolist()
        np.testing.assert_allclose(got.top_logprobs[i], want[i][order], atol=1e-5)
        np.testing.assert_allclose(got.logprob[i], want[i, token], atol=1e-5)
        assert got.rank[i] == 1 + (x[i] > x[i, token]).sum()
    assert got.rank[2] > 1 and got.rank[0] == 1
    assert tokens[2] != x[2].argmax()


def test_gather_logprobs_ranks_and_no_top_tokens():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    got = jax.jit(sampling.gather_logprobs, static_argnums=2)(logits, jnp.asarray([3, 2]), 0)
    assert got.top_ids.shape == got.top_logprobs.shape == (2, 0)
    assert got.rank.tolist() == [3, 1]
    assert sampling.gather_logprobs(logits, jnp.asarray([2, 0]), 50).top_ids.tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]


def test_to_logprobs_puts_the_token_first_and_cuts_to_k():
    arrays_ = sampling.TokenLogprobs(*(jnp.asarray(a) for a in ([[4, 5, 6]], [[-0.5, -1.0, -2.0]], [-3.0], [9])))
    out = sampling.to_logprobs(arrays_, 0, 7, 2, str)
    assert list(out) == [7, 4, 5] and (out[7].rank, out[7].logprob, out[7].decoded_token) == (9, -3.0, "7")
    assert [(lp.rank, lp.logprob) for lp in list(out.values())[1:]] == [(1, -0.5), (2, -1.0)]
    assert len(sampling.to_logprobs(arrays_, 0, 5, 3, str)) == 3


def test_tokens_stay_where_the_next_step_finds_them():
    """In every mode: each at its row, also a broken one's -1; nowhere else; what nobody waits for in the last row."""
    logits = np.zeros((4, V), np.float32)
    logits[[0, 1, 3], [9, 8, 7]] = 5.0
    logits[1, 3] = np.nan
    before, rows = np.arange(100, 101 + SEQS, dtype=np.int32), np.array([6, 2, 0, SEQS], np.int32)
    batch = arrays([request(temperature=0)] * 3, 4)
    state = state_of([])
    for fn, rest in ((sampling.sample_greedy, ()), (_full, (state, batch)), (_logprobs, (state, batch))):
        options = {"max_logprobs": K} if fn is _logprobs else {}
        tokens, after = fn(logits, jnp.asarray(before), rows, *rest, **options)[:2]
        assert tokens.tolist() == [9, -1, 0, 7]
        want = before.copy()
        want[rows] = [9, -1, 0, 7]
        assert after.tolist() == want.tolist()
    for row in (0, 6, SEQS):  # one row alone takes another way
        rows = np.array([row], np.int32)
        tokens, after = jax.jit(sampling.sample_greedy)(logits[:1], before, rows)
        want = before.copy()
        want[row] = 9
        assert tokens.tolist() == [9] and after.tolist() == want.tolist()
