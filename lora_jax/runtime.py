"""The device side of the engine: parameters, pages, adapter stacks, sampling state, and the table that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .dispatch import StepTable
from .lora.adapter import Adapter
from .lora.weights import slot_arrays
from .request import Logprobs
from .sampling import TokenLogprobs, batch_arrays, reset_arrays, sample_mode, to_logprobs
from .scheduler import ScheduledRow, StepPlan
from .spec import RuntimeSpec
from .step import Params
from .step_keys import SAMPLE_MODES, StepKey


@dataclass
class StepResult:
    """tokens: request id -> sampled token, -1 where the logits are not finite. logprobs: of those tokens, where asked for.
    prompt_logprobs: (request id, position) -> of that prompt token."""

    tokens: dict[str, int]
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[tuple[str, int], Logprobs] = field(default_factory=dict)


class Runtime:
    """Runs plans. Used by the engine's thread only. A step that raises may have lost donated state: see `recover`."""

    def __init__(self, spec: RuntimeSpec, params: Params, table: StepTable, token_text: Callable[[int], str | None]):
        self.spec, self.table = spec, table
        self._params, self._text = params, token_text
        self._stacks = table[StepKey("init_slots", 1, lora=True)]() if spec.lora else None
        self._kv, self._state = table[StepKey("init", 1)]()

    def warm_up(self, progress: Callable[[StepKey], None] = lambda key: None) -> None:
        """Run every step once on padding alone, through the live batch builder: on a GPU the first call of an executable
        loads its kernels and instantiates its graphs."""
        for key in self.table.keys():
            if key.phase in ("decode", "prefill"):
                logits, *hidden = self._model_step(key, ())
                for mode in SAMPLE_MODES:
                    self._sample(logits, (), mode)
                if hidden:
                    self._prompt_logprobs_step(key, (), hidden[0])
            progress(key)
        jax.block_until_ready((self._kv, self._state))
        self.table.reset_hits()

    def write_slot(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter's weights in a device slot, every module of it."""
        lora = self.spec.lora
        assert lora is not None
        rank = lora.config.padded_rank
        arrays = slot_arrays(adapter, lora.targets, lora.groups, rank, jnp.dtype(self.spec.dtype))
        self._stacks = self.table[StepKey("write_slot", 1, lora=True)](self._stacks, np.int32(slot), arrays)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens."""
        for row in plan.rows:
            if row.request.params.penalised and plan.phase == "prefill" and row.start == 0:
                self._reset_row(row)
        out = self._model_step(plan.key, plan.rows)
        sampling = [row.request if row.samples else None for row in plan.rows]
        mode = sample_mode(sampling)
        tokens, logprobs = self._sample(out[0], sampling, mode)
        result = StepResult({})
        for i, request in enumerate(sampling):
            if request is None:
                continue
            token = result.tokens[request.request_id] = int(tokens[i])
            if token >= 0 and request.params.logprobs is not None and logprobs is not None:
                entry = to_logprobs(logprobs, i, token, request.params.logprobs, self._text)
                result.logprobs[request.request_id] = entry
        if plan.phase == "prefill" and any(row.request.params.prompt_logprobs is not None for row in plan.rows):
            self._prompt_logprobs(plan, out[1], result)
        return result

    def recover(self) -> None:
        """Make anew the state that a failed step lost; the caller has every adapter slot written again."""
        lost = lambda tree: any(x.is_deleted() for x in jax.tree.leaves(tree))  # noqa: E731
        self._kv, self._state = None, None  # free the old pages before new ones are made
        self._kv, self._state = self.table[StepKey("init", 1)]()
        if self._stacks is not None and lost(self._stacks):
            self._stacks = self.table[StepKey("init_slots", 1, lora=True)]()

    def _call(self, key: StepKey, *args: Any) -> Any:
        return self.table[key](*args)

    def _lora_args(self, key: StepKey, rows: Sequence[ScheduledRow]) -> tuple[tuple, tuple]:
        """(what comes before, what comes after) the step's own arguments."""
        if not key.lora:
            return (self._params,), ()
        return (self._params, self._stacks), (self.spec.builder.slot_ids(rows, key.bucket),)

    def _model_step(self, key: StepKey, rows: Sequence[ScheduledRow]) -> tuple:
        head, tail = self._lora_args(key, rows)
        inputs = getattr(self.spec.builder, key.phase)(rows, key.bucket)
        *out, self._kv = self._call(key, *head, self._kv, *inputs, *tail)
        return tuple(out)

    def _sample(self, logits: jax.Array, requests: Sequence, mode: str) -> tuple[np.ndarray, TokenLogprobs | None]:
        key = StepKey("sample", logits.shape[0], mode=mode)
        if mode == "greedy":
            return np.asarray(self._call(key, logits)), None
        spec = self.spec
        seqs, vocab = spec.builder.scheduler.max_num_seqs, spec.model.vocab_size
        batch = batch_arrays(requests, key.bucket, max_num_seqs=seqs, vocab_size=vocab, engine_seed=spec.seed)
        tokens, self._state, *logprobs = self._call(key, logits, self._state, batch)
        return np.asarray(tokens), jax.device_get(logprobs[0]) if logprobs else None

    def _reset_row(self, row: ScheduledRow) -> None:
        args = reset_arrays(row.request, self.spec.builder.scheduler.max_model_len, self.spec.model.vocab_size)
        self._state = self._call(StepKey("sampling_state", 1), self._state, *args)

    def _prompt_logprobs_step(self, prefill: StepKey, rows: Sequence[ScheduledRow], hidden: jax.Array) -> TokenLogprobs:
        key = StepKey("prompt_logprobs", prefill.bucket, prefill.lora)
        head, tail = self._lora_args(key, rows)
        return self._call(key, *head, hidden, self.spec.builder.targets(rows, key.bucket), *tail)

    def _prompt_logprobs(self, plan: StepPlan, hidden: jax.Array, result: StepResult) -> None:
        logprobs = jax.device_get(self._prompt_logprobs_step(plan.key, plan.rows, hidden))
        at = 0
        for row in plan.rows:
            request, k = row.request, row.request.params.prompt_logprobs
            last = min(row.start + row.num_tokens, len(request.prompt_token_ids) - 1)
            for position in range(row.start + 1, last + 1) if k is not None else ():
                i = at + position - row.start - 1
                entry = to_logprobs(logprobs, i, request.token_ids[position], k or 0, self._text)
                result.prompt_logprobs[request.request_id, position] = entry
            at += row.num_tokens
