"""Choosing tokens from logits on the device, and the few host arrays that say how. Knows no model.

Letters: R rows of a batch, V vocabulary, K top tokens to report, S = max_num_seqs + 1 rows of state (last: padding).

A row's draw depends on its logits, its parameters, its seed and its output index alone: not on its place in the batch,
the bucket, or what its neighbours ask for. The costly parts (penalties, noise, sort) run only when some row needs them,
and leave the bits of the rows that don't need them alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .errors import RequestError
from .request import Logprob, Logprobs, Request, SamplingParams
from .step_keys import SampleMode

MAX_BANNED = 16  # ids that min_tokens can hold back
GREEDY_BELOW = 1e-5  # temperatures below count as 0, as in vLLM: dividing by them would overflow

# Columns of the host arrays.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_TOP_K, _ROW, _STEP, _SEED_HIGH, _SEED_LOW, _BANNED = range(6)
_GREEDY_FLOATS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
# What float32 arithmetic with logits bears; beyond, the answer is that of the limit. (-inf / inf, say, would be NaN.)
_MAX_TEMPERATURE = 1e20
_REPETITION_SPAN = 1e-10, 1e10

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


# ---- host side


def banned_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> list[int]:
    """Tokens that may not come before min_tokens. Raises: RequestError when the device can't hold back so many."""
    if params.min_tokens == 0:
        return []
    ids = sorted({*eos_token_ids, *(params.stop_token_ids or ())})
    if len(ids) > MAX_BANNED:
        message = f"min_tokens works with at most {MAX_BANNED} end tokens, this request has {len(ids)}"
        raise RequestError(f"{message}: send fewer stop_token_ids, or min_tokens=0", param="stop_token_ids")
    return ids


def request_seed(request: Request, engine_seed: int) -> int:
    """The 64 bits that decide a request's draws: its seed, else one made of the engine's seed and the request's id."""
    if request.params.seed is not None:
        return request.params.seed & 0xFFFFFFFFFFFFFFFF
    digest = hashlib.blake2b(f"{engine_seed}:{request.request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _bans_now(request: Request) -> bool:
    return request.num_output < request.params.min_tokens


def sample_mode(requests: Sequence[Request | None]) -> SampleMode:
    """The cheapest sample entry that serves them all: "greedy" (plain argmax), "full", or "logprobs". None: padding."""
    mode: SampleMode = "greedy"
    for request in requests:
        if request is None:
            continue
        params = request.params
        if params.logprobs is not None:
            return "logprobs"
        if params.temperature >= GREEDY_BELOW or params.penalised or _bans_now(request):
            mode = "full"
    return mode


def batch_arrays(
    requests: Sequence[Request | None], bucket: int, *, max_num_seqs: int, vocab_size: int, engine_seed: int
) -> dict[str, np.ndarray]:
    """The parameters of up to `bucket` rows as two arrays: "floats" float32 [R, 6], "ints" int32 [R, 5 + MAX_BANNED].

    Row i belongs to requests[i], with the state of `request.row` and the output index `request.num_output`. None, and
    what is missing to the bucket, is padding: greedy, on the state's last row. With no requests: what warm-up needs.
    """
    floats, settings = [], []
    ints = np.full((bucket, _BANNED + MAX_BANNED), vocab_size, np.int32)
    padding = (0, max_num_seqs, 0, 0, 0)
    for i, request in enumerate(requests):
        values, words = _row(request, vocab_size, engine_seed) if request else (_GREEDY_FLOATS, padding)
        floats.append(values)
        settings.append(words)
        if request and _bans_now(request):
            ids = [t for t in banned_ids(request.params, request.eos_token_ids) if 0 <= t < vocab_size]
            ints[i, _BANNED : _BANNED + len(ids)] = ids
    missing = bucket - len(floats)
    floats += [_GREEDY_FLOATS] * missing
    settings += [padding] * missing
    ints[:, :_BANNED] = np.array(settings, np.uint32).view(np.int32)
    return {"floats": np.array(floats, np.float32), "ints": ints}


def _row(request: Request, vocab_size: int, engine_seed: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """A request's floats, and its integers (as words of 32 bits) up to the banned ids."""
    p = request.params
    repetition = min(max(p.repetition_penalty, _REPETITION_SPAN[0]), _REPETITION_SPAN[1])
    if p.temperature >= GREEDY_BELOW:
        seed = request_seed(request, engine_seed)
        words = (min(max(p.top_k, 0), vocab_size), request.row, request.num_output, seed >> 32, seed & 0xFFFFFFFF)
        temperature = min(p.temperature, _MAX_TEMPERATURE)
        floats = (temperature, p.top_p, p.min_p, repetition, p.presence_penalty, p.frequency_penalty)
        return floats, words
    floats = (*_GREEDY_FLOATS[:_REPETITION], repetition, p.presence_penalty, p.frequency_penalty)
    return floats, (0, request.row, request.num_output, 0, 0)


def reset_arrays(request: Request, max_model_len: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `reset_row`: row int32 [], prompt and output ids int32 [max_model_len], padded with V.

    Only a penalised request needs its row reset: when it gets the row, also after a preemption.
    """
    ids = np.full((2, max_model_len), vocab_size, np.int32)
    ids[0, : len(request.prompt_token_ids)] = request.prompt_token_ids
    ids[1, : request.num_output] = request.output_token_ids
    return np.asarray(request.row, np.int32), ids[0], ids[1]


def to_logprobs(logprobs: TokenLogprobs, row: int, token: int, k: int, text: Callable[[int], str | None]) -> Logprobs:
    """One row of fetched arrays as the dict of a `RequestOutput`: the token itself, then the k most likely ones.

    text: function from a token id to its text.
    """
    out = {token: Logprob(float(logprobs.logprob[row]), int(logprobs.rank[row]), text(token))}
    top = zip(logprobs.top_ids[row, :k].tolist(), logprobs.top_logprobs[row, :k].tolist(), strict=True)
    for rank, (id, value) in enumerate(top, 1):
        out.setdefault(id, Logprob(value, rank, text(id)))
    return out


# ---- device side


def sample_greedy(logits: jax.Array) -> jax.Array:
    """[R, V] float -> int32 [R]: each row's most likely token (of equals the lowest id), -1 without a finite one."""
    x_rv = logits.astype(jnp.float32)
    return _checked(jnp.argmax(x_rv, axis=-1).astype(jnp.int32), x_rv)


def sample_full(logits: jax.Array, state: SamplingState, batch: Batch) -> tuple[jax.Array, SamplingState]:
    """One token a row, by everything that SamplingParams asks for.

    logits: [R, V] float. state: donated. batch: what `batch_arrays` gives. Returns: tokens int32 [R], the state with
    the tokens counted. A row whose logits hold a NaN, or no finite maximum, gives -1 and leaves the others alone.
    """
    raw_rv = logits.astype(jnp.float32)
    floats, ints = jnp.asarray(batch["floats"]), jnp.asarray(batch["ints"])
    tokens = _checked(_choose(_penalised(raw_rv, state, floats, ints), floats, ints), raw_rv)
    counted = jnp.where(tokens < 0, raw_rv.shape[1], tokens)
    counts = state.output_counts.at[ints[:, _ROW], counted].add(1, mode="drop")
    return tokens, state._replace(output_counts=counts)


def sample_logprobs(
    logits: jax.Array, state: SamplingState, batch: Batch, *, max_logprobs: int
) -> tuple[jax.Array, SamplingState, TokenLogprobs]:
    """`sample_full` and the log-probabilities of each token and of the max_logprobs most likely ones."""
    tokens, state = sample_full(logits, state, batch)
    return tokens, state, gather_logprobs(logits, jnp.maximum(tokens, 0), max_logprobs)


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


def _checked(tokens: jax.Array, raw_rv: jax.Array) -> jax.Array:
    """-1 where the raw logits hold a NaN or their largest is infinite: argmax points at a NaN if there is one."""
    worst = jnp.take_along_axis(raw_rv, jnp.argmax(raw_rv, axis=-1, keepdims=True), axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(worst), tokens, -1)


def _penalised(x_rv: jax.Array, state: SamplingState, floats: jax.Array, ints: jax.Array) -> jax.Array:
    """Penalties, then -inf for what min_tokens holds back."""
    repetition, presence, frequency = (floats[:, c, None] for c in (_REPETITION, _PRESENCE, _FREQUENCY))
    banned = ints[:, _BANNED:]

    def apply(x: jax.Array) -> jax.Array:
        rows = ints[:, _ROW]
        counts = state.output_counts[rows]
        seen = state.prompt_seen[rows] | (counts > 0)
        x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * counts - jnp.where(counts > 0, presence, 0.0)
        return x.at[jnp.arange(x.shape[0])[:, None], banned].set(-jnp.inf, mode="drop")

    wanted = jnp.any((repetition != 1) | (presence != 0) | (frequency != 0)) | jnp.any(banned < x_rv.shape[1])
    return lax.cond(wanted, apply, lambda x: x, x_rv)


def _choose(x_rv: jax.Array, floats: jax.Array, ints: jax.Array) -> jax.Array:
    random = floats[:, _TEMPERATURE] > 0

    def noisy(x: jax.Array) -> jax.Array:
        scaled = _filtered(x / jnp.where(random, floats[:, _TEMPERATURE], 1.0)[:, None], floats, ints)
        return jnp.where(random[:, None], scaled + _gumbel(ints, x.shape[1]), x)

    return jnp.argmax(lax.cond(jnp.any(random), noisy, lambda x: x, x_rv), axis=-1).astype(jnp.int32)


def _filtered(x_rv: jax.Array, floats: jax.Array, ints: jax.Array) -> jax.Array:
    """-inf for what min_p, then top_k, then top_p leave out."""
    min_p, top_p, top_k = floats[:, _MIN_P, None], floats[:, _TOP_P, None], ints[:, _TOP_K, None]
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
    seeds = lax.bitcast_convert_type(ints[:, _SEED_HIGH : _SEED_LOW + 1], jnp.uint32)

    def bits(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, step), (vocab,), jnp.uint32)

    # All 32 bits: the small u, which decide the winner in a large vocabulary, must not lie on a coarse grid.
    u = (jax.vmap(bits)(seeds, ints[:, _STEP]).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24)))
