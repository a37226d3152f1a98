"""The step functions: pure, one pair (without and with adapters) per phase.

The plain functions never see an adapter argument, so an engine with LoRA enabled runs, while no adapter is active, exactly
the program of an engine without it. Parameters travel as one flat tuple and the module tree is put back together inside the
trace: calling costs far less than with nested state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .kv_cache import DecodeInputs, PrefillInputs
from .lora.apply import LoRAStack, SlotIds
from .sampling import gather_logprobs, sample_greedy

Params = tuple[jax.Array, ...]
Pages = tuple[jax.Array, ...]


@dataclass(frozen=True)
class ModelDef:
    """What is needed to rebuild a model inside a trace from flat parameters (and stacks and slot ids)."""

    graphdef: Any
    treedef: Any
    paths: tuple[tuple, ...]  # of the flat parameters, in order
    slots: tuple = ()  # ((path, variable), ...) of slot ids
    stacks: tuple = ()

    @classmethod
    def of(cls, model: nnx.Module) -> ModelDef:
        """Of a module tree whose arrays may be shapes only."""
        graphdef, slots, stacks, params = nnx.split(model, SlotIds, LoRAStack, ...)
        leaves = jax.tree_util.tree_flatten(params)
        paths = tuple(path for path, _ in nnx.to_flat_state(params))
        assert len(paths) == len(leaves[0])
        flat = lambda state: tuple(nnx.to_flat_state(state))  # noqa: E731
        return cls(graphdef, leaves[1], paths, flat(slots), flat(stacks))

    def plain(self, params: Params) -> Any:
        return nnx.merge(self.graphdef, jax.tree_util.tree_unflatten(self.treedef, params))

    def with_adapters(
        self, params: Params, stacks: dict, token_slots: jax.Array, embed_slots: jax.Array, head_slots: jax.Array
    ) -> Any:
        ids = {"token": token_slots, "embed": embed_slots, "head": head_slots}
        slots = [(path, var.replace(ids[var.rows])) for path, var in self.slots]
        values = [(path, var.replace(stacks[var.group]["ab".index(var.part)])) for path, var in self.stacks]
        state = jax.tree_util.tree_unflatten(self.treedef, params)
        return nnx.merge(self.graphdef, nnx.from_flat_state(slots), nnx.from_flat_state(values), state)


def _decode(
    model, kv: Pages, last_tokens: jax.Array, meta: jax.Array, implementation: str, items: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, Pages]:
    inputs, rows = DecodeInputs(meta[:, 0], meta[:, 2:], implementation, items), meta[:, 1]
    tokens = jnp.maximum(last_tokens[rows], 0)  # -1: a row that failed; nobody reads what it gives
    hidden, kv = model.model(tokens, inputs.positions, kv, inputs)
    logits = model.lm_head(hidden)
    chosen, last_tokens = sample_greedy(logits, last_tokens, rows)
    return chosen, logits, last_tokens, kv


def _prefill(
    model, kv: Pages, last_tokens: jax.Array, tokens, meta, page_list, blocks, last, implementation: str, items=None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Pages]:
    inputs = PrefillInputs(*meta, page_list=page_list, blocks=blocks, implementation=implementation, items=items)
    hidden, kv = model.model(tokens, inputs.positions, kv, inputs)
    logits = model.lm_head(hidden[last[0]])
    chosen, last_tokens = sample_greedy(logits, last_tokens, last[1])
    return chosen, logits, hidden, last_tokens, kv


def _prompt_logprobs(head: Callable, targets: jax.Array, k: int, *rows: jax.Array, block: int = 32):
    """head(*rows) gives logits; those of all positions never exist at once, only a block of them."""
    t = targets.shape[0]
    block = min(block, t)
    pad = -t % block
    split = lambda x: jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])  # noqa: E731
    out = lax.map(lambda part: gather_logprobs(head(*part[1:]), part[0], k), tuple(map(split, (targets, *rows))))
    return jax.tree.map(lambda x: x.reshape(t + pad, *x.shape[2:])[:t], out)


def plain_steps(definition: ModelDef, max_logprobs: int, implementation: str) -> dict[str, Callable]:
    """decode(params, kv, last_tokens int32 [max_num_seqs + 1], meta int32 [R, 2 + P]: position, row of last_tokens, block
    table) -> (tokens int32 [R], logits [R, V], last_tokens, kv).
    prefill(params, kv, last_tokens, tokens [T], meta int32 [3, T]: position, sequence, cache index; page_list int32 [3, N];
    blocks int32 [4, B]; last int32 [2, S]: place in [T] whose logits are wanted, row of last_tokens) -> (tokens int32 [S],
    logits [S, V], hidden [T, hidden], last_tokens, kv).
    prompt_logprobs(params, hidden, targets int32 [T]) -> what `gather_logprobs` gives, for all T.
    tokens: the greedy choice, as `sample_greedy` makes it, and left in last_tokens. kv, last_tokens: donated.
    implementation: of the step's kernels, "triton" or "xla".
    """

    def decode_step(params, kv, last_tokens, meta):
        return _decode(definition.plain(params), kv, last_tokens, meta, implementation)

    def prefill_step(params, kv, last_tokens, tokens, meta, page_list, blocks, last):
        model = definition.plain(params)
        return _prefill(model, kv, last_tokens, tokens, meta, page_list, blocks, last, implementation)

    def prompt_logprobs_step(params, hidden, targets):
        return _prompt_logprobs(definition.plain(params).lm_head, targets, max_logprobs, hidden)

    return {"decode": decode_step, "prefill": prefill_step, "prompt_logprobs": prompt_logprobs_step}


def lora_steps(definition: ModelDef, max_logprobs: int, implementation: str) -> dict[str, Callable]:
    """As `plain_steps`, with `stacks` after params and last, each int32 for a row or token: `slot_ids` of the decoder's layers,
    and `end_slots`, those of the embedding and the head, -1 where the adapter has nothing for them. prompt_logprobs has the
    second alone, decode and prefill have the items of `SlotRanks` after both."""

    def decode_lora_step(params, stacks, kv, last_tokens, meta, slot_ids, end_slots, items):
        model = definition.with_adapters(params, stacks, slot_ids, end_slots, end_slots)
        return _decode(model, kv, last_tokens, meta, implementation, items)

    def prefill_lora_step(
        params, stacks, kv, last_tokens, tokens, meta, page_list, blocks, last, slot_ids, end_slots, items
    ):
        model = definition.with_adapters(params, stacks, slot_ids, end_slots, end_slots[last[0]])
        return _prefill(model, kv, last_tokens, tokens, meta, page_list, blocks, last, implementation, items)

    def prompt_logprobs_lora_step(params, stacks, hidden, targets, end_slots):
        head = lambda rows, ids: definition.with_adapters(params, stacks, ids, ids, ids).lm_head(rows)  # noqa: E731
        return _prompt_logprobs(head, targets, max_logprobs, hidden, end_slots)

    return {"decode": decode_lora_step, "prefill": prefill_lora_step, "prompt_logprobs": prompt_logprobs_lora_step}
