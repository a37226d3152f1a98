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
from .lora.staging import Staging
from .lora.weights import place_arrays
from .plan import ScheduledRow, StepPlan
from .request import Logprobs, Request
from .sampling import TokenLogprobs, to_logprobs
from .sampling_inputs import reset_arrays
from .spec import RuntimeSpec
from .step import Params
from .step_keys import SAMPLE_MODES, SampleMode, StepKey


@dataclass(frozen=True, eq=False)
class InFlight:
    """A step that was handed to the device. tokens: int32 [bucket], in the order of the plan's rows."""

    plan: StepPlan
    tokens: jax.Array
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


@dataclass
class StepResult:
    """tokens: request id -> sampled token, -1 where the logits are not finite. logprobs: of those tokens, where asked for.
    prompt_logprobs: (request, position, those of its prompt token there)."""

    tokens: dict[str, int]
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Request, int, Logprobs]] = field(default_factory=list)


class Runtime:
    """Runs plans. Used by the engine's thread only. A step that raises may have lost donated state: see `recover`.

    `dispatch` does not wait for the device, and a step takes the tokens of the one before it on the device: steps run in the
    order in which they were dispatched, whether or not anybody has read the earlier ones.
    """

    def __init__(self, spec: RuntimeSpec, params: Params, table: StepTable, token_text: Callable[[int], str | None]):
        self.spec, self.table = spec, table
        self._params, self._text = params, token_text
        self._rows, self._settings = spec.builder.table(), spec.row_settings()
        self._slot_ranks = spec.lora.slot_ranks() if spec.lora else None
        self._staging = Staging(self._place_arrays)
        self._on_device: dict[StepKey, tuple[tuple[np.ndarray, ...], Any]] = {}
        self._make_state()

    def _make_state(self) -> None:
        self._on_device.clear()
        self._stacks = self.table[StepKey("init_slots", 1, lora=True)]() if self.spec.lora else None
        self._kv, self._state, self._last_tokens = self.table[StepKey("init", 1)]()

    def warm_up(self, progress: Callable[[StepKey], None] = lambda key: None) -> None:
        """Run every step once on padding alone, through the live batch builder: on a GPU the first call of an executable
        loads its kernels and instantiates its graphs."""
        for key in self.table.keys():
            if key.phase in ("decode", "prefill"):
                _, logits, *hidden = self._model_step(key, ())
                for mode in SAMPLE_MODES:
                    self._sample(mode, logits, ())
                if hidden:
                    self._prompt_logprobs_step(key, (), hidden[0])
            progress(key)
        jax.block_until_ready((self._kv, self._state, self._last_tokens))
        self.table.reset_hits()

    def stage(self, adapter: Adapter) -> bool:
        """Whether `write_slot` of it is a copy on the device. If not, another thread sends it there: ask again. From any thread."""
        return self._staging.ready(adapter)

    def write_slot(self, slot: int, places: Sequence[int], adapter: Adapter) -> None:
        """Put an adapter's weights in the places of a device slot, every module of it. Steps dispatched before still see the old
        ones."""
        lora, write = self.spec.lora, StepKey("write_slot", 1, lora=True)
        assert lora is not None and self._slot_ranks is not None
        for piece, (place, arrays) in enumerate(zip(places, self._staging.take(adapter), strict=True)):
            self._stacks = self._call(write, self._stacks, np.array((place, slot, piece), np.int32), arrays)
        self._slot_ranks.put(slot, places, adapter, lora.targets)

    def _place_arrays(self, adapter: Adapter) -> list[Any]:
        """Of each of its places what is written there, on the device."""
        lora = self.spec.lora
        assert lora is not None
        rank, dtype = lora.config.place_rank, jnp.dtype(self.spec.dtype)
        pieces = range(lora.config.places_for(adapter.rank))
        arrays = [place_arrays(adapter, lora.targets, lora.groups, rank, piece, dtype) for piece in pieces]
        return jax.block_until_ready(jax.device_put(arrays, self.spec.setup.sharding))

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Hand one step to the device, without waiting for it or for those before."""
        if plan.phase == "prefill":
            for request in plan.begun:
                self._start_row(request)
        tokens, logits, *hidden = self._model_step(plan.key, plan.rows)
        logprobs = prompt_logprobs = None
        mode = self._settings.mode(plan.rows)
        if mode is not None:
            tokens, logprobs = self._sample(mode, logits, plan.rows)
        if hidden and any(row.request.params.prompt_logprobs is not None for row in plan.rows):
            prompt_logprobs = self._prompt_logprobs_step(plan.key, plan.rows, hidden[0])
        for array in jax.tree.leaves((tokens, logprobs, prompt_logprobs)):
            array.copy_to_host_async()
        return InFlight(plan, tokens, logprobs, prompt_logprobs)

    def read(self, step: InFlight) -> StepResult:
        """Wait for a step and fetch what it gave. Raises what the device raises."""
        tokens = np.asarray(step.tokens).tolist()
        rows = step.plan.rows
        result = StepResult(
            {row.request.request_id: token for row, token in zip(rows, tokens, strict=False) if row.samples}
        )
        if step.logprobs is not None:
            logprobs = jax.device_get(step.logprobs)
            for i, row in enumerate(rows):
                k = row.request.params.logprobs
                if row.samples and k is not None and tokens[i] >= 0:
                    result.logprobs[row.request.request_id] = to_logprobs(logprobs, i, tokens[i], k, self._text)
        if step.prompt_logprobs is not None:
            self._read_prompt_logprobs(rows, jax.device_get(step.prompt_logprobs), result)
        return result

    def recover(self) -> None:
        """Make all device state but the parameters anew, after a step that failed or was interrupted; the caller computes
        every request again and has every adapter slot written again."""
        self._kv, self._state, self._last_tokens, self._stacks = None, None, None, None  # free the old before
        self._staging.forget()
        self._make_state()

    def _call(self, key: StepKey, *args: Any) -> Any:
        return self.table[key](*args)

    def _lora_args(self, key: StepKey, rows: Sequence[ScheduledRow]) -> tuple[tuple, tuple]:
        """(what comes before, what comes after) the step's own arguments."""
        if not key.lora:
            return (self._params,), ()
        slot_ids = self.spec.builder.slot_ids(rows, key.bucket)
        assert self._slot_ranks is not None
        end_slots = self._slot_ranks.end_slots(slot_ids)
        if key.phase == "prompt_logprobs":
            return (self._params, self._stacks), (end_slots,)
        items = self._slot_ranks.items(slot_ids, self.spec.builder.most_requests(key), key.items)
        return (self._params, self._stacks), self._kept(key, (slot_ids, end_slots, items))

    def _kept(self, key: StepKey, arrays: tuple[np.ndarray, ...]) -> Any:
        """The arrays, on the device while a decode step's stay the same: the device waits 4 us for each that is copied."""
        if key.phase != "decode":
            return arrays
        last = self._on_device.get(key)
        if last is None or not all(a is b or np.array_equal(a, b) for a, b in zip(arrays, last[0], strict=True)):
            last = self._on_device[key] = arrays, jax.device_put(arrays, self.spec.setup.sharding)
        return last[1]

    def _model_step(self, key: StepKey, rows: Sequence[ScheduledRow]) -> tuple:
        """(greedy tokens, logits), and the hidden rows of a prefill."""
        builder, (head, tail) = self.spec.builder, self._lora_args(key, rows)
        if key.phase == "decode":
            self._rows.update(rows)
            inputs = (builder.decode(rows, key.bucket, self._rows),)
        else:
            inputs = builder.prefill(rows, key.bucket)
        *out, self._last_tokens, self._kv = self._call(key, *head, self._kv, self._last_tokens, *inputs, *tail)
        return tuple(out)

    def _sample(
        self, mode: SampleMode, logits: jax.Array, scheduled: Sequence[ScheduledRow]
    ) -> tuple[jax.Array, TokenLogprobs | None]:
        """Chooses the tokens of all rows anew, in place of the model step's greedy ones."""
        bucket, builder = logits.shape[0], self.spec.builder
        rows, index = builder.rows(scheduled, bucket), builder.indices(scheduled, bucket)
        batch = self._settings.arrays(rows, index)
        key = StepKey("sample", bucket, mode=mode)
        out = self._call(key, logits, self._last_tokens, rows, self._state, batch)
        tokens, self._last_tokens, self._state, *logprobs = out
        return tokens, logprobs[0] if logprobs else None

    def _start_row(self, request: Request) -> None:
        """A request starts on its row, for the first time or again."""
        self._rows.start(request.row)
        self._settings.put(request.row, request)
        if request.params.penalised:
            args = reset_arrays(request, self.spec.builder.scheduler.max_model_len, self.spec.model.vocab_size)
            self._state = self._call(StepKey("sampling_state", 1), self._state, *args)

    def _prompt_logprobs_step(self, prefill: StepKey, rows: Sequence[ScheduledRow], hidden: jax.Array) -> TokenLogprobs:
        key = StepKey("prompt_logprobs", prefill.bucket, prefill.lora)
        head, tail = self._lora_args(key, rows)
        return self._call(key, *head, hidden, self.spec.builder.targets(rows, key.bucket), *tail)

    def _read_prompt_logprobs(self, rows: Sequence[ScheduledRow], logprobs: TokenLogprobs, result: StepResult) -> None:
        at = 0
        for row in rows:
            request, k = row.request, row.request.params.prompt_logprobs
            last = min(row.start + row.num_tokens, len(request.prompt_token_ids) - 1)
            for position in range(row.start + 1, last + 1) if k is not None else ():
                i = at + position - row.start - 1
                entry = to_logprobs(logprobs, i, request.prompt_token_ids[position], k or 0, self._text)
                result.prompt_logprobs.append((request, position, entry))
            at += row.num_tokens
