"""Choosing tokens from logits on the device. Knows no model.

Letters: R rows of a batch, V vocabulary, K top tokens to report, S = max_num_seqs + 1 rows of state (last: padding).

A row's draw depends on its logits, its parameters, its seed and its output index alone: not on its place in the batch,
the bucket, or what its neighbours ask for. The costly parts (penalties, noise, sort) run only when some row needs them,
and leave the bits of the rows that don't need them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .request import Logprob, Logprobs
from .sampling_inputs import (
    BANNED,
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    STEP,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

Batch = dict[str, np.ndarray] | dict[str, jax.Array]


class SamplingState(NamedTuple):
    """What penalties remember of each row. prompt_seen: bool [S, V]. output_counts: int32 [S, V]."""

    prompt_seen: jax.Array
    output_counts: jax.Array


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities of the raw logits. Ranks are 1-based: 1 + how many logits are larger.

    top_ids: int32 [R, K], top_logprobs: float32 [R, K], most likely first; logprob: float32 [R]; rank: int32 [R].
    """

    top_ids: jax.Array
    top_logprobs: jax.Array
    logprob: jax.Array
    rank: jax.Array


def state_avals(max_num_seqs: int, vocab_size: int) -> SamplingState:
    """Shapes and dtypes of the state: 5 bytes x (max_num_seqs + 1) x vocab_size."""
    shape = (max_num_seqs + 1, vocab_size)
    return SamplingState(jax.ShapeDtypeStruct(shape, jnp.bool_), jax.ShapeDtypeStruct(shape, jnp.int32))  # type: ignore[arg-type]


def init_state(max_num_seqs: int, vocab_size: int) -> SamplingState:
    return jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), state_avals(max_num_seqs, vocab_size))


def init_last_tokens(max_num_seqs: int) -> jax.Array:
    """int32 [max_num_seqs + 1]: the last token chosen for each row, where the next decode step finds it (last: padding)."""
    return jnp.zeros(max_num_seqs + 1, jnp.int32)


def to_logprobs(logprobs: TokenLogprobs, row: int, token: int, k: int, text: Callable[[int], str | None]) -> Logprobs:
    """One row of fetched arrays as the dict of a `RequestOutput`: the token itself, then the k most likely ones.

    text: function from a token id to its text.
    """
    out = {token: Logprob(float(logprobs.logprob[row]), int(logprobs.rank[row]), text(token))}
    top = zip(logprobs.top_ids[row, :k].tolist(), logprobs.top_logprobs[row, :k].tolist(), strict=True)
    for rank, (id, value) in enumerate(top, 1):
        out.setdefault(id, Logprob(value, rank, text(id)))
    return out


def sample_greedy(logits: jax.Array, last_tokens: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's most likely token; part of every model step.

    logits: [R, V] float. last_tokens: int32 [S], donated. rows: int32 [R], the rows of last_tokens that the tokens go to
    (the padding row for those that nobody waits for). Returns: tokens int32 [R], last_tokens with them. A row whose logits
    hold a NaN, or no finite maximum, gives -1.
    """
    tokens = _most_likely(lax.optimization_barrier(logits))  # as rounded for the caller: XLA may keep more bits inside
    return tokens, _kept(last_tokens, rows, tokens)


def sample_full(
    logits: jax.Array, last_tokens: jax.Array, rows: jax.Array, state: SamplingState, batch: Batch
) -> tuple[jax.Array, jax.Array, SamplingState]:
    """One token a row, by everything that SamplingParams asks for.

    logits, last_tokens, rows: as in `sample_greedy`; rows are those of the state too. state: donated. batch: what
    `RowSettings.arrays` gives. Returns: tokens int32 [R], last_tokens with them, the state with them counted. A row whose
    logits hold a NaN, or no finite maximum, gives -1 and leaves the others alone.
    """
    raw_rv = logits.astype(jnp.float32)
    floats, ints = jnp.asarray(batch["floats"]), jnp.asarray(batch["ints"])
    tokens = _choose(_penalised(raw_rv, rows, state, floats, ints), floats, ints)
    tokens = jnp.where(_most_likely(raw_rv) < 0, -1, tokens)
    counted = jnp.where(tokens < 0, raw_rv.shape[1], tokens)
    counts = state.output_counts.at[rows, counted].add(1, mode="drop")
    return tokens, _kept(last_tokens, rows, tokens), state._replace(output_counts=counts)


def sample_logprobs(
    logits: jax.Array, last_tokens: jax.Array, rows: jax.Array, state: SamplingState, batch: Batch, *, max_logprobs: int
) -> tuple[jax.Array, jax.Array, SamplingState, TokenLogprobs]:
    """`sample_full` and the log-probabilities of each token and of the max_logprobs most likely ones."""
    tokens, last_tokens, state = sample_full(logits, last_tokens, rows, state, batch)
    return tokens, last_tokens, state, gather_logprobs(logits, jnp.maximum(tokens, 0), max_logprobs)


def _kept(last_tokens: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    if len(rows) == 1:  # a scatter of one element would be two kernels
        return lax.dynamic_update_slice(last_tokens, tokens, rows)
    return last_tokens.at[rows].set(tokens, mode="promise_in_bounds")


def gather_logprobs(logits: jax.Array, targets: jax.Array, k: int) -> TokenLogprobs:
    """logits: [R, V] float; targets: int32 [R], ids whose log-probability and rank are wanted; k: top tokens wanted."""
    x_rv = logits.astype(jnp.float32)
    norm_r1 = jax.nn.logsumexp(x_rv, axis=-1, keepdims=True)
    target_r1 = jnp.take_along_axis(x_rv, targets[:, None], axis=-1)
    rank = 1 + jnp.sum(x_rv > target_r1, axis=-1, dtype=jnp.int32)
    top_rk, ids = lax.top_k(x_rv, min(k, x_rv.shape[1]))
    return TokenLogprobs(ids.astype(jnp.int32), top_rk - norm_r1, (target_r1 - norm_r1)[:, 0], rank)


def reset_row(state: SamplingState, row: jax.Array, prompt_ids: jax.Array, output_ids: jax.Array) -> SamplingState:
    """Sets what a row remembers. row: int32 []; prompt_ids, output_ids: int32 [P], padded with V. state: donated."""
    vocab = state.prompt_seen.shape[1]
    seen = jnp.zeros(vocab, jnp.bool_).at[prompt_ids].set(True, mode="drop")
    counts = jnp.zeros(vocab, jnp.int32).at[output_ids].add(1, mode="drop")
    return SamplingState(state.prompt_seen.at[row].set(seen), state.output_counts.at[row].set(counts))


def _most_likely(logits: jax.Array) -> jax.Array:
    """int32 [R]: the id of each row's largest logit, of equals the lowest; -1 where there is a NaN or it is infinite.

    One reduction gives both, so that a GPU needs no further kernel: what spoils a row counts as its largest value, with id
    -1, and -inf, which is the reduction's identity, has that id too.
    """
    x_rv = logits.astype(jnp.float32)
    x_rv = jnp.where(jnp.isnan(x_rv), jnp.inf, x_rv)
    ids_rv = jnp.where(jnp.isinf(x_rv), -1, lax.broadcasted_iota(jnp.int32, x_rv.shape, 1))

    def larger(one, other):
        (x, id), (y, other_id) = one, other
        first = (x > y) | ((x == y) & (id < other_id))
        return jnp.where(first, x, y), jnp.where(first, id, other_id)

    return lax.reduce((x_rv, ids_rv), (np.float32(-np.inf), np.int32(-1)), larger, (1,))[1]


def _penalised(x_rv: jax.Array, rows: jax.Array, state: SamplingState, floats: jax.Array, ints: jax.Array) -> jax.Array:
    """Penalties, then -inf for what min_tokens holds back."""
    repetition, presence, frequency = (floats[:, c, None] for c in (REPETITION, PRESENCE, FREQUENCY))
    banned = ints[:, BANNED:]

    def apply(x: jax.Array) -> jax.Array:
        counts = state.output_counts[rows]
        seen = state.prompt_seen[rows] | (counts > 0)
        x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * counts - jnp.where(counts > 0, presence, 0.0)
        return x.at[jnp.arange(x.shape[0])[:, None], banned].set(-jnp.inf, mode="drop")

    wanted = jnp.any((repetition != 1) | (presence != 0) | (frequency != 0)) | jnp.any(banned < x_rv.shape[1])
    return lax.cond(wanted, apply, lambda x: x, x_rv)


def _choose(x_rv: jax.Array, floats: jax.Array, ints: jax.Array) -> jax.Array:
    random = floats[:, TEMPERATURE] > 0

    def noisy(x: jax.Array) -> jax.Array:
        scaled = _filtered(x / jnp.where(random, floats[:, TEMPERATURE], 1.0)[:, None], floats, ints)
        return jnp.where(random[:, None], scaled + _gumbel(ints, x.shape[1]), x)

    return jnp.argmax(lax.cond(jnp.any(random), noisy, lambda x: x, x_rv), axis=-1).astype(jnp.int32)


def _filtered(x_rv: jax.Array, floats: jax.Array, ints: jax.Array) -> jax.Array:
    """-inf for what min_p, then top_k, then top_p leave out."""
    min_p, top_p, top_k = floats[:, MIN_P, None], floats[:, TOP_P, None], ints[:, TOP_K, None]
    # log(0) is -inf, below which there is nothing: no row needs an exception.
    x_rv = jnp.where(x_rv < jnp.max(x_rv, axis=-1, keepdims=True) + jnp.log(min_p), -jnp.inf, x_rv)
    cut = lambda x: jnp.where(_in_top(x, top_k, top_p), x, -jnp.inf)  # noqa: E731
    return lax.cond(jnp.any((top_k > 0) | (top_p < 1)), cut, lambda x: x, x_rv)


def _in_top(x_rv: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens top_k and top_p keep. Equals of the k-th token all stay; at top_p's edge lower ids stay first.

    One stable sort finds the last token that stays; its value and id then tell of every token if it comes before.
    """
    vocab = x_rv.shape[1]
    ids_rv = lax.broadcasted_iota(jnp.int32, x_rv.shape, 1)
    falling, order = lax.sort((-x_rv, ids_rv), dimension=1, num_keys=1, is_stable=True)
    sorted_rv = -falling
    kth = jnp.take_along_axis(sorted_rv, jnp.where(top_k > 0, top_k, vocab) - 1, axis=-1)
    p_rv = jnp.where(sorted_rv >= kth, jnp.exp(sorted_rv - sorted_rv[:, :1]), 0.0)
    cumulative = jnp.cumsum(p_rv, axis=-1)
    before = jnp.sum(cumulative < top_p * cumulative[:, -1:], axis=-1, keepdims=True, dtype=jnp.int32)
    last = jnp.where(top_p < 1, jnp.minimum(before, vocab - 1), vocab - 1)
    edge, edge_id = jnp.take_along_axis(sorted_rv, last, axis=-1), jnp.take_along_axis(order, last, axis=-1)
    return (x_rv >= kth) & ((x_rv > edge) | ((x_rv == edge) & (ids_rv <= edge_id)))


def _gumbel(ints: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise, float32 [R, V], from each row's seed and output index."""
    seeds = lax.bitcast_convert_type(ints[:, SEED_HIGH : SEED_LOW + 1], jnp.uint32)

    def bits(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, step), (vocab,), jnp.uint32)

    # All 32 bits: the small u, which decide the winner in a large vocabulary, must not lie on a coarse grid.
    u = (jax.vmap(bits)(seeds, ints[:, STEP]).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))
