"""What the sample entries get from the host: how each row's request wants its tokens chosen. Host only: never imports jax.

Letters: R rows of a batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import RequestError
from .request import Request, SamplingParams
from .step_keys import SampleMode

if TYPE_CHECKING:
    from .plan import ScheduledRow

MAX_BANNED = 16  # ids that min_tokens can hold back
GREEDY_BELOW = 1e-5  # temperatures below count as 0, as in vLLM: dividing by them would overflow

# Columns of the arrays.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
TOP_K, STEP, SEED_HIGH, SEED_LOW, BANNED = range(5)
_GREEDY_FLOATS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
# What float32 arithmetic with logits bears; beyond, the answer is that of the limit. (-inf / inf, say, would be NaN.)
_MAX_TEMPERATURE = 1e20
_REPETITION_SPAN = 1e-10, 1e10


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


class RowSettings:
    """The sampling parameters of the request on each row, so that a step's arrays are gathered and not made anew.

    The row after the last is padding: greedy.
    """

    def __init__(self, num_rows: int, vocab_size: int, engine_seed: int):
        self._vocab, self._seed = vocab_size, engine_seed
        self._floats = np.tile(np.array(_GREEDY_FLOATS, np.float32), (num_rows + 1, 1))
        self._ints = np.zeros((num_rows + 1, BANNED + MAX_BANNED), np.int32)
        self._ints[:, BANNED:] = vocab_size
        self._min_tokens = np.zeros(num_rows + 1, np.int64)
        self._greedy_from: list[float] = [0] * num_rows  # the first index of the output that needs no sample entry
        self._logprobs = [False] * num_rows

    def put(self, row: int, request: Request) -> None:
        """From now on the row is this request's."""
        p, vocab = request.params, self._vocab
        repetition = min(max(p.repetition_penalty, _REPETITION_SPAN[0]), _REPETITION_SPAN[1])
        random = p.temperature >= GREEDY_BELOW
        chosen = (min(p.temperature, _MAX_TEMPERATURE), p.top_p, p.min_p) if random else _GREEDY_FLOATS[:REPETITION]
        seed = request_seed(request, self._seed) if random else 0
        words = (min(max(p.top_k, 0), vocab) if random else 0, 0, seed >> 32, seed & 0xFFFFFFFF)
        banned = [t for t in banned_ids(p, request.eos_token_ids) if 0 <= t < vocab]
        self._floats[row] = (*chosen, repetition, p.presence_penalty, p.frequency_penalty)
        self._ints[row, :BANNED] = np.array(words, np.uint32).view(np.int32)
        self._ints[row, BANNED:] = vocab
        self._ints[row, BANNED : BANNED + len(banned)] = banned
        self._min_tokens[row] = min(p.min_tokens, np.iinfo(np.int64).max)
        self._logprobs[row] = p.logprobs is not None
        self._greedy_from[row] = math.inf if random or p.penalised or self._logprobs[row] else p.min_tokens

    def mode(self, rows: Sequence[ScheduledRow]) -> SampleMode | None:
        """The cheapest sample entry that serves all rows; None: the greedy tokens of the model step do."""
        greedy_from = self._greedy_from
        others = [row.request.row for row in rows if row.samples and row.index < greedy_from[row.request.row]]
        if not others:
            return None
        return "logprobs" if any(self._logprobs[row] for row in others) else "full"

    def arrays(self, rows: np.ndarray, index: np.ndarray) -> dict[str, np.ndarray]:
        """ "floats" float32 [R, 6] and "ints" int32 [R, 4 + MAX_BANNED] of rows int32 [R], each about to choose the token of
        that index int32 [R] of its output. Copies: the arrays of a step in flight never change."""
        ints = self._ints[rows]
        ints[:, STEP] = index
        ints[index >= self._min_tokens[rows], BANNED:] = self._vocab
        return {"floats": self._floats[rows], "ints": ints}


def reset_arrays(request: Request, max_model_len: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `reset_row`: row int32 [], prompt and output ids int32 [max_model_len], padded with V.

    Only a penalised request needs its row reset: when it gets the row, also after a preemption.
    """
    ids = np.full((2, max_model_len), vocab_size, np.int32)
    ids[0, : len(request.prompt_token_ids)] = request.prompt_token_ids
    ids[1, : request.num_output] = request.output_token_ids
    return np.asarray(request.row, np.int32), ids[0], ids[1]
