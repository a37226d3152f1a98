"""The products and the attention of a decode step, each alone, as the layers of a model call them: `bench kernels MODEL`.

A program makes a chain of calls, each with weights of its own; see `kernel_timing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lora_jax.kernels.adapters import adapter_counters
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.deferred_norm import DeferredNorm
from lora_jax.kernels.lora_items import items_of
from lora_jax.kernels.rope_cache import HeadNorms

from ..config import CacheConfig
from ..kv_cache import DecodeInputs, kv_shape
from ..lora.weights import PLACES, stack_avals
from ..models import layers
from ..models.llama import hf_plan
from ..models.rope import inv_freq
from ..spec import RuntimeSpec
from ..step_keys import StepKey
from . import kernel_timing as timing

KINDS = ("qkv", "o", "gate_up", "down", "attention")
PRODUCTS = ("matmul_tiles", "swiglu_tiles", "lora_tiles")
LAYER = ("model", "layers", 0)
# Parameters of a layer that each kind reads, by the beginning of their paths. The projection is timed with a short attention,
# which reads its partial sums.
READS: dict[str, tuple[tuple[str, ...], ...]] = {
    "qkv": (("self_attn", "qkv_proj"), ("self_attn", "q_norm"), ("self_attn", "k_norm")),
    "o": (("self_attn", "o_proj"), ("post_attention_layernorm",)),
    "gate_up": (("mlp", "gate_up_proj"),),
    "down": (("mlp", "down_proj"), ("input_layernorm",)),
    "attention": (("self_attn", "q_norm"), ("self_attn", "k_norm")),
}
LONGEST = 2048  # tokens of context that attention is timed with, or half of what the block tables hold
SHORT = 16  # tokens, with the projection
CALLS_BYTES, MOST_CALLS = 512 << 20, 32  # read by one program; calls in it


@dataclass(frozen=True)
class LayerOp:
    """One kind of op in a decode step of `rows` rows, without adapters or with as many as it has room for: all that slots and rows
    can hold, or so many items."""

    spec: RuntimeSpec  # of one layer
    kind: str
    rows: int
    lora: bool = False
    items: int = 0

    @property
    def name(self) -> str:
        return f"{StepKey('decode', self.rows, self.lora, items=self.items)} {self.kind}"

    @property
    def rules(self) -> tuple[str, ...]:
        """Whose tiles its time says something about."""
        return ("attention_tiles",) if self.kind == "attention" else PRODUCTS

    # ---- what a call reads ----
    @property
    def adapters(self) -> int:
        if not self.lora or self.spec.lora is None:
            return 0
        config = self.spec.lora.config
        most = self.items // items_of(config.padded_rank) if self.items else config.max_loras
        return min(most, config.max_loras, self.rows)

    @property
    def context(self) -> int:
        """Tokens of each row, the new one included."""
        most = self.spec.builder.scheduler.max_model_len
        return min(most, SHORT) if self.kind != "attention" else max(1, min(most // 2, LONGEST))

    def must_read(self) -> int:
        """Bytes of weights, of adapters, and of keys and values."""
        item, model = jnp.dtype(self.spec.dtype).itemsize, self.spec.model
        if self.kind == "attention":
            return self.rows * self.context * 2 * model.num_kv_heads * model.head_dim * item
        size = sum(int(np.prod(shape)) for path, shape in self._shapes().items() if self._reads(path))
        config = self.spec.lora.config if self.spec.lora else None
        places = self.adapters * config.places_of_slot if config else 0
        return item * (size + sum(int(np.prod(s)) // s[1] * places for s in self._stack_shapes(1)))

    def calls(self, on_gpu: bool) -> int:
        return max(2, min(MOST_CALLS, -(-CALLS_BYTES // self.must_read()))) if on_gpu else 1

    def _shapes(self) -> dict[tuple, tuple[int, ...]]:
        plan = hf_plan(self.spec.model)
        return {path: plan[path].shape for path in self.spec.definition.paths}

    def _reads(self, path: tuple) -> bool:
        return path[:3] == LAYER and any(path[3 : 3 + len(start)] == start for start in READS[self.kind])

    def _stack_shapes(self, layers_: int) -> tuple[tuple[int, ...], ...]:
        """Of a and b; none without adapters."""
        if not self.lora or self.spec.lora is None or self.kind not in self.spec.lora.groups:
            return ()
        config = self.spec.lora.config
        shapes = self.spec.lora.groups[self.kind].shapes(config.num_places, config.place_rank)
        return tuple((layers_, *shape[1:]) for shape in shapes)

    # ---- operands ----
    def operands(self, rotation: int, calls: int) -> timing.Operands:
        """For `program`; the last calls of the rotation read what the first do."""
        dtype, groups = str(jnp.dtype(self.spec.dtype)), max(1, -(-rotation // (self.must_read() * calls)))
        if self.kind == "attention":
            return self._attention_operands(dtype, groups * calls)
        read = [(path, shape) for path, shape in self._shapes().items() if self._reads(path)]
        entries = []
        for g in range(groups):
            stacks = tuple(timing.values(shape, dtype, 3 + i) for i, shape in enumerate(self._stack_shapes(calls)))
            for c in range(calls):
                values = [timing.values(shape, dtype, 7 * (g * calls + c) + i) for i, (_, shape) in enumerate(read)]
                entries.append((jnp.int32(c), values, stacks))
        tables = np.arange(1, self.rows + 1, dtype=np.int32)[:, None]
        carry = [self._pages(1 + self.rows, dtype)] if self.kind == "qkv" else []
        return timing.Operands(self._fixed(dtype, tables), entries, carry)

    def _attention_operands(self, dtype: str, copies: int) -> timing.Operands:
        each = CacheConfig(self.spec.builder.cache.page_size, 2).pages_for(self.context)
        free = 1 << 32  # bytes of pages; beyond, entries share them
        copies_there = max(1, min(copies, free // max(self.must_read(), 1)))
        pages = 1 + np.random.default_rng(0).permutation(copies_there * self.rows * each).astype(np.int32)
        tables = pages.reshape(copies_there, self.rows, each)
        read = [shape for path, shape in self._shapes().items() if self._reads(path)]
        values = [timing.values(shape, dtype, 5 + i) for i, shape in enumerate(read)]
        padded = [jnp.asarray(self._padded(t)) for t in tables]
        entries = [(jnp.int32(i), values, (), padded[i % copies_there]) for i in range(copies)]
        return timing.Operands(self._fixed(dtype, tables[0]), entries, [self._pages(1 + pages.size, dtype)])

    def _pages(self, pages: int, dtype: str) -> jax.Array:
        model = self.spec.model
        cache = CacheConfig(self.spec.builder.cache.page_size, pages)
        return timing.values(kv_shape(cache, model.num_kv_heads, model.head_dim), dtype, 1)

    def _padded(self, tables: np.ndarray) -> np.ndarray:
        out = np.zeros((self.rows, self.spec.builder.max_pages_per_seq), np.int32)
        out[:, : tables.shape[1]] = tables
        return out

    def _fixed(self, dtype: str, tables: np.ndarray) -> dict[str, Any]:
        model, rows = self.spec.model, self.rows
        positions = jnp.full((rows,), self.context - 1, jnp.int32)
        slot_ids = np.arange(rows, dtype=np.int32) % max(self.adapters, 1)
        fixed: dict[str, Any] = {
            "positions": positions,
            "tables": jnp.asarray(self._padded(tables)),
            "rope": layers.rope_tables(positions, jnp.asarray(inv_freq(model.rope, model.head_dim))),
            "x": timing.values((rows, model.hidden_size), dtype, 2),
            "slot_ids": jnp.asarray(slot_ids),
        }
        if self.lora and self.spec.lora is not None:
            ranks = self.spec.lora.slot_ranks()
            ranks.fill()
            fixed["items"] = jnp.asarray(ranks.items(slot_ids, rows, self.items))
        stream, qkv = jax.eval_shape(self._before, fixed)
        fixed["normed"] = _like(stream.normed)
        inputs = {"o": model.num_heads * model.head_dim, "down": model.intermediate_size}
        if self.kind in inputs:
            fixed["y"] = timing.values((rows, inputs[self.kind]), dtype, 4)
        if self.kind == "attention":
            fixed["qkv"] = _like(qkv)
        return fixed

    # ---- the program ----
    def _inputs(self, fixed: dict[str, Any], tables: Any = None) -> DecodeInputs:
        tables = fixed["tables"] if tables is None else tables
        return DecodeInputs(fixed["positions"], tables, self.spec.setup.implementation, fixed.get("items"))

    def _layer(self, values: Any, stacks: Any, slot_ids: Any, number: Any) -> Any:
        """The layer with these parameters, and shapes alone in place of what it does not read."""
        taken, dtype = iter(values), self.spec.dtype
        params: Any = tuple(
            next(taken) if values and self._reads(path) else jax.ShapeDtypeStruct(shape, dtype)
            for path, shape in self._shapes().items()
        )
        if not self.lora or self.spec.lora is None:
            return self.spec.definition.plain(params).model.layers[0]
        lora = self.spec.lora
        there: dict[str, Any] = stack_avals(lora.groups, lora.config, dtype, None)
        if PLACES in there:
            there[PLACES] = (jnp.asarray(lora.slot_ranks().filled_places()),)
        if stacks:
            there[self.kind] = stacks
        layer = lora.definition.with_adapters(params, there, *(slot_ids,) * 3).model.layers[0]
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            object.__setattr__(linear, "lora_layer", number)  # traced: one form of the call for all layers
        return layer

    def _before(self, fixed: dict[str, Any]) -> tuple[layers.Stream, Any]:
        """The stream as a layer finds it, and its projection to q, k and v: for their shapes."""
        model, inputs = self.spec.model, self._inputs(fixed)
        shape = lambda *s: jnp.zeros(s, self.spec.dtype)  # noqa: E731
        plain = LayerOp(self.spec, "o", self.rows)
        values = [shape(*s) for path, s in plain._shapes().items() if plain._reads(path)]
        layer = plain._layer(values, (), None, None)
        stream = layers.Stream.start(fixed["x"], layer.post_attention_layernorm, model, inputs)
        y = shape(self.rows, model.num_heads * model.head_dim)
        stream = layers.add(stream, layer.self_attn.o_proj, y, layer.post_attention_layernorm, inputs)
        plain = LayerOp(self.spec, "qkv", self.rows)
        values = [shape(*s) for path, s in plain._shapes().items() if plain._reads(path)]
        return layers.project(stream, plain._layer(values, (), None, None).self_attn.qkv_proj, inputs)

    def _attend(self, attention: Any, qkv: Any, kv: Any, arrivals: Any, fixed: Any, inputs: DecodeInputs) -> Any:
        norms = None
        if hasattr(attention, "q_norm"):
            norms = HeadNorms(attention.q_norm.scale[...], attention.k_norm.scale[...], attention.q_norm.eps)
        how: dict[str, Any] = dict(heads=attention.heads, window=attention.window, norms=norms)
        return inputs.attend(qkv, fixed["rope"], kv, arrivals=arrivals, **how)

    def call(self, fixed: dict[str, Any], entry: Any, carry: list, arrivals: Any) -> tuple[Any, list, Any]:
        """(result, carry, arrivals) of one call."""
        number, values, stacks, *tables = entry
        layer, inputs = self._layer(values, stacks, fixed["slot_ids"], number), self._inputs(fixed, *tables)
        stream = layers.Stream(fixed["x"], fixed["normed"], arrivals)
        if self.kind == "o":
            stream = layers.add(stream, layer.self_attn.o_proj, fixed["y"], layer.post_attention_layernorm, inputs)
        elif self.kind == "down":
            stream = layers.add(stream, layer.mlp.down_proj, fixed["y"], layer.input_layernorm, inputs)
        elif self.kind == "gate_up":
            stream, out = layers.activate(stream, layer.mlp.gate_up_proj, inputs)
            return out, carry, stream.arrivals
        else:
            qkv = fixed.get("qkv")
            if self.kind == "qkv":
                stream, qkv = layers.project(stream, layer.self_attn.qkv_proj, inputs)
            out, kv, arrivals = self._attend(layer.self_attn, qkv, carry[0], stream.arrivals, fixed, inputs)
            return out, [kv], arrivals
        return (stream.x, stream.normed), carry, stream.arrivals

    def program(self) -> Any:
        """A new jitted (fixed, entries, carry) -> (results, carry); the carry is donated."""
        one = jax.jit(self.call)

        def run(fixed, entries, carry):
            arrivals, outs = self._arrivals(fixed, len(entries)), []
            for entry in entries:
                if outs:  # in this order: neither merged nor side by side
                    fixed, outs[-1] = lax.optimization_barrier((fixed, outs[-1]))
                out, carry, arrivals = one(fixed, entry, carry, arrivals)
                outs.append(out)
            return outs, carry

        return jax.jit(run, donate_argnums=2)

    def _arrivals(self, fixed: dict[str, Any], calls: int) -> jax.Array | None:
        if self.spec.setup.implementation != "triton":
            return None
        pieces = max(self.spec.model.hidden_size // 64, self.rows * self.spec.model.num_kv_heads)
        return new_arrivals(pieces + (adapter_counters(fixed["items"], calls) if "items" in fixed else 0))


def _like(value: Any) -> Any:
    """Numbers of that shape; squares as of a row whose norm is one."""
    if isinstance(value, DeferredNorm):
        squares = jnp.full(value.squares.shape, value.scaled.shape[1] / value.squares.shape[0], jnp.float32)
        return DeferredNorm(_like(value.scaled), squares, value.eps)
    return timing.values(value.shape, str(value.dtype), 6)


def layer_ops(spec: RuntimeSpec, rows: tuple[int, ...]) -> list[LayerOp]:
    """Of decode steps of so many rows: without adapters, then with them where the model's spec has some."""
    out = []
    for r in rows:
        out += [LayerOp(spec, kind, r) for kind in KINDS]
        if spec.lora is None or spec.item_buckets is None:
            continue
        for items in (0, *spec.item_buckets.smaller(r)):
            ops = [LayerOp(spec, kind, r, True, items) for kind in KINDS[:4] if kind in spec.lora.groups]
            out += [op for op in ops if op.adapters]  # with none there is nothing to time
    return out


def settled(result: Any) -> list[np.ndarray]:
    """One call's result as plain numbers, however many partial sums it is left in."""
    leaves = jax.tree.leaves(result, is_leaf=lambda v: isinstance(v, DeferredNorm))
    return [np.asarray(v.normed() if isinstance(v, DeferredNorm) else v, np.float32) for v in leaves]
