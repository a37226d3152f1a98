"""Adapters on ordinary NNX modules: a class swap gives a module its adapter stacks, nothing else about it changes.

The swapped class is a subclass, so paths, parameters, checkpoints and isinstance checks stay as they were. All modules of a
group share one pair of stacked variables, and all modules called on the same rows share one variable of slot ids: few leaves,
and the step's inputs set every module at once. Only this file imports the LoRA kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from lora_jax.kernels import lora_expand, lora_shrink
from lora_jax.kernels.adapters import Adapters, fits_adapters
from lora_jax.kernels.places import pieces
from lora_jax.kernels.tiled_lora import TileAdapters, fits_tiles

from ..errors import ConfigError
from .sites import GroupShape, LoRASite, decoder_linears
from .weights import PLACES


class LoRAStack(nnx.Variable):
    """One group's stacked A or B (see `GroupShape` for shapes), or which places slots have. Metadata: group, part ("a" or "b")."""


class SlotIds(nnx.Variable):
    """int32 [rows]: each row's device slot, -1 for the base model; an explicit input of the step. Metadata: rows
    ("token": the decoder's, "embed": the embedding's, "head": those of the logits)."""


@functools.partial(jax.jit, static_argnames=("slices", "implementation", "interpret"))
def _delta(y, x, a, b, slot_ids, places, layer, *, slices, implementation, interpret):
    # a jit of its own with the layer as operand: one lowering and one kernel a linear shape, however many layers
    how = dict(implementation=implementation, interpret=interpret)
    return _sum(y, b, slot_ids, places, layer, slices, how, lambda ids: lora_shrink(x, a, ids, layer, **how))


def _sum(y, b, slot_ids, places, layer, slices, how: dict, shrunk: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """y + h B, rounded once. shrunk: h of the rows' places, -1: none."""
    own = pieces(slot_ids, places)
    if len(own) == 1:
        return lora_expand(y, shrunk(own[0]), b, own[0], layer, slices=slices, **how)
    delta = jnp.zeros(y.shape, jnp.float32)
    for ids in own:
        delta = lora_expand(delta, shrunk(ids), b, ids, layer, slices=slices, **how)
    return jnp.where((slot_ids >= 0)[:, None], (y.astype(jnp.float32) + delta).astype(y.dtype), y)


def lora_linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    a: jax.Array,
    b: jax.Array,
    slot_ids: jax.Array,
    layer: int,
    *,
    slices: tuple[int, ...],
    places: jax.Array | None = None,
    precision: lax.PrecisionLike = None,
    implementation: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """x @ kernel + bias + each row's own adapter delta (Hu et al., LoRA, 2021; Punica's shrink and expand, 2023).

    x [..., in], kernel [in, out], bias [out] or None; a [layers, places, len(slices) * rank, in], b [layers, places, rank, out]
    with the scale folded in; slot_ids int32 [x.shape[0]], -1: base, bit for bit; places int32 [slots, pieces]: where each slot's
    ranks lie, None: places are slots. Base product and delta belong to one op, so
    that a fused kernel can take both.
    """
    y = lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=precision)
    if bias is not None:
        y = y + bias
    rows = x.size // x.shape[-1]
    ids = _of_rows(slot_ids, rows)
    out = _delta(
        y.reshape(rows, -1),
        x.reshape(rows, -1),
        a,
        b,
        ids,
        places,
        jnp.int32(layer),
        slices=slices,
        implementation=implementation,
        interpret=interpret,
    )
    return out.reshape(y.shape)


def _of_rows(slot_ids: jax.Array, rows: int) -> jax.Array:
    """Slots of the rows that inputs of more dimensions are flattened to."""
    # Given a length too, jnp.repeat counts on the device, in three kernels and a copy.
    return slot_ids if rows == slot_ids.shape[0] else jnp.repeat(slot_ids, rows // slot_ids.shape[0])


class LoRALinear(nnx.Linear):
    """`nnx.Linear` after `attach`."""

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        return lora_linear(x, kernel, bias, **lora_operands(self), precision=self.precision)


class LoRAEmbed(nnx.Embed):
    """`nnx.Embed` after `attach`: adds A[:, token] through B, the shrink being a gather."""

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        y = super().__call__(inputs)
        op = lora_operands(self)
        rows = inputs.reshape(-1)
        ids = _of_rows(op["slot_ids"], rows.size)
        how = dict(implementation=op["implementation"], interpret=op["interpret"])

        def shrunk(places):  # [1, rows, rank]
            return op["a"][op["layer"], jnp.maximum(places, 0), rows].astype(jnp.float32)[None]

        flat = y.reshape(rows.size, -1)
        out = _sum(flat, op["b"], ids, op["places"], jnp.int32(op["layer"]), op["slices"], how, shrunk)
        return out.reshape(y.shape)


def lora_operands(module) -> dict[str, Any]:
    """The adapter arguments of `lora_linear` for an attached module."""
    return dict(
        a=module.lora_a[...],
        b=module.lora_b[...],
        slot_ids=module.lora_slots[...],
        places=_places(module),
        layer=module.lora_layer,
        slices=module.lora_slices,
        implementation=module.lora_implementation,
        interpret=module.lora_interpret,
    )


def _places(module) -> jax.Array | None:
    return None if module.lora_places is None else module.lora_places[...]


def row_adapters(linear: nnx.Linear, rows: int, items: jax.Array | None) -> Adapters | None:
    """For a kernel that takes the place of an attached linear, adapters and all; None where no such kernel does. items: of a
    step, as `SlotRanks.items` gives them; those of `TileAdapters` are not for such kernels."""
    operands = _step_operands(linear, items, 2)
    if operands is None or not fits_adapters(rows, linear.kernel.shape[0], operands["slices"], linear.kernel.dtype):
        return None
    return Adapters(**operands)


def tile_adapters(linear: nnx.Linear, items: jax.Array | None) -> TileAdapters | None:
    """For kernels beside the product of an attached linear, its `base_product`; None where no such kernels are. items: of a
    step, as `SlotRanks.items` gives them; those of `Adapters` are not for such kernels."""
    operands = _step_operands(linear, items, 3)
    if operands is None or not fits_tiles(linear.kernel.shape[0], operands["slices"], linear.kernel.dtype):
        return None
    return TileAdapters.of(**operands)


def base_product(linear: nnx.Linear, x: jax.Array) -> jax.Array:
    """What the linear gives without adapters, attached or not."""
    return nnx.Linear.__call__(linear, x)


def _step_operands(linear: nnx.Linear, items: jax.Array | None, ndim: int) -> dict[str, Any] | None:
    """Of `Adapters`, whose items have two dimensions, or of `TileAdapters`, whose items have three."""
    module: Any = linear
    if items is None or items.ndim != ndim or not isinstance(linear, LoRALinear) or module.lora_number is None:
        return None
    return dict(
        a=module.lora_a[...],
        b=module.lora_b[...],
        slot_ids=module.lora_slots[...],
        places=_places(module),
        items=items,
        layer=jnp.int32(module.lora_layer),
        slices=module.lora_slices,
        linear=module.lora_number,
    )


_SUBCLASS: dict[type, type] = {nnx.Linear: LoRALinear, nnx.Embed: LoRAEmbed}


def register_lora_class(kind: type, subclass: type) -> None:
    """Say which subclass of `kind` applies adapters; its __call__ uses `lora_linear(..., **lora_operands(self))`."""
    assert issubclass(subclass, kind)
    _SUBCLASS[kind] = subclass


def _swap_class(module: nnx.Module, name: str) -> None:
    kind = type(module)
    if kind not in _SUBCLASS:
        raise ConfigError(f"{name}: no adapter can attach to a {kind.__name__}")
    if isinstance(module, nnx.Linear) and (
        module.dot_general is not lax.dot_general or module.preferred_element_type is not None
    ):
        raise ConfigError(f"{name}: a Linear with its own dot_general or preferred_element_type takes no adapter")
    module.__class__ = _SUBCLASS[kind]


def attach(
    model: Any,
    sites: Iterable[LoRASite],
    groups: Mapping[str, GroupShape],
    stacks: Mapping[str, tuple[jax.ShapeDtypeStruct, ...]],
    *,
    implementation: str,
    interpret: bool = False,
) -> None:
    """Give the modules at `sites` their stacks, as shapes without arrays: the caller supplies arrays when it merges.

    stacks: of `stack_avals`. Mutates `model`. Raises ConfigError naming a module that cannot carry an adapter.
    """
    variables = {
        name: tuple(LoRAStack(shape, group=name, part=p) for p, shape in zip("ab", shapes, strict=False))
        for name, shapes in stacks.items()
    }
    (places,) = variables.get(PLACES, (None,))
    numbers = {name: i for i, name in enumerate(decoder_linears(groups))}
    slots = {rows: SlotIds(jax.ShapeDtypeStruct((1,), jnp.int32), rows=rows) for rows in ("token", "embed", "head")}
    for site in sites:
        module: Any = functools.reduce(lambda m, k: m[k] if isinstance(k, int) else getattr(m, k), site.path, model)
        _swap_class(module, "/".join(map(str, site.path)))
        module.lora_a, module.lora_b = variables[site.group]
        module.lora_places = places
        module.lora_slots = slots["head" if site.head else "embed" if site.kind == "embedding" else "token"]
        module.lora_layer, module.lora_slices = site.layer, site.slices
        module.lora_number = numbers.get(site.group)
        module.lora_implementation, module.lora_interpret = implementation, interpret
