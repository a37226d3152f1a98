"""The adapters of one linear in a step of few rows: operands of the products in whose kernels they are computed (`fused_lora`).

Letters: T rows, K inputs, N outputs, L layers, S slots, R padded rank, n slices, J items at most, G linears of a layer.
Sources: Hu et al., "LoRA", 2021; Chen et al., "Punica", 2023.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from . import lora_layout as layout
from .arrivals import check_arrivals
from .lora_expand import lora_expand
from .lora_items import FIELDS, ITEM
from .lora_shrink import lora_shrink
from .places import check_places, pieces
from .tuning import matmul_tiles

LINE = 32  # counters in a cache line


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["a", "b", "slot_ids", "items", "layer", "places"],
    meta_fields=["slices", "linear"],
)
@dataclass(frozen=True)
class Adapters:
    """The adapters of one linear in one step.

    a [L, P, n*Q, K] and b [L, P, Q, N] as `lora_layout` says, finite everywhere; slot_ids int32 [T], -1: none; items int32
    [G, J * FIELDS]: of `work_items`; layer int32 scalar, an operand. slices: widths of the n output slices; linear: which of
    the G lists is this linear's. places int32 [S, C] as `places` says, None: they are slots.
    """

    a: jax.Array
    b: jax.Array
    slot_ids: jax.Array
    items: jax.Array
    layer: jax.Array
    slices: tuple[int, ...]
    linear: int
    places: jax.Array | None = None

    @property
    def rank(self) -> int:
        """R"""
        return self.b.shape[2] * (1 if self.places is None else self.places.shape[1])


def adapter_counters(items: jax.Array, layers: int) -> int:
    """How many counters of `new_arrivals` a step needs beside its pieces, for lists as `Adapters` holds them: at its end one an
    item, zeros again after each kernel, and before them a line for each linear of each layer. Those count up once and stay:
    they are new in every step, in which each linear is computed once."""
    linears, room = items.shape[0], items.shape[1] // FIELDS
    return room + layers * linears * LINE


def fits_adapters(rows: int, inputs: int, slices: tuple[int, ...], dtype: Any) -> bool:
    """Whether products of these sizes, which `skinny_matmul.fits` takes, may carry adapters. Not in float16, where h could
    overflow; a tile of columns lies in one slice; more slices than four would not fit every card."""
    if jnp.dtype(dtype) == jnp.float16 or len(slices) > 4:
        return False
    block_n = matmul_tiles(rows, inputs, sum(slices), jnp.dtype(dtype).itemsize, adapters=True).block_n
    return not any(width % block_n for width in slices)


def check_adapters(
    op: str, adapters: Adapters, arrivals: Any, rows: int, inputs: int, outputs: int, dtype: Any
) -> None:
    """Raises: ValueError naming the operand."""
    a, b, n = adapters.a, adapters.b, len(adapters.slices)
    ok = a.ndim == b.ndim == 4 and a.shape[:2] == b.shape[:2] and a.shape[2] == n * b.shape[2]
    if not ok or a.shape[3] != inputs or b.shape[3] != outputs:
        raise ValueError(
            f"{op}: needs a [L, S, {n} * R, {inputs}] and b [L, S, R, {outputs}], got {a.shape} and {b.shape}"
        )
    if a.dtype != dtype or b.dtype != dtype:
        raise ValueError(f"{op}: a and b must have the dtype of the product ({dtype}), got {a.dtype} and {b.dtype}")
    if (
        sum(adapters.slices) != outputs
        or min(adapters.slices, default=0) < 1
        or not fits_adapters(rows, inputs, adapters.slices, dtype)
    ):
        raise ValueError(
            f"{op}: slices {adapters.slices} of {dtype} must add up to {outputs}, as multiples of a tile (see fits_adapters)"
        )
    layout.check_rows(op, rows, adapters.slot_ids, adapters.layer)
    check_places(op, adapters.places, adapters.b.shape[2], ITEM)
    check_items(op, adapters)
    check_arrivals(op, arrivals, adapter_counters(adapters.items, a.shape[0]))


def check_items(op: str, adapters: Adapters) -> None:
    """Raises: ValueError naming them."""
    items = adapters.items
    if (
        items.dtype != jnp.int32
        or items.ndim != 2
        or items.shape[1] % (4 * FIELDS)
        or not 0 <= adapters.linear < items.shape[0]
    ):
        want = f"int32 [G > {adapters.linear}, J * {FIELDS}], J a multiple of 4"
        raise ValueError(f"{op}: items must be {want}, got {items.dtype} {items.shape}")


def plain_delta(x: jax.Array, adapters: Adapters) -> jax.Array:
    """In plain JAX: what the adapters add to x @ w, float32 [T, N]."""
    out = jnp.zeros((x.shape[0], adapters.b.shape[3]), jnp.float32)
    for ids in pieces(adapters.slot_ids, adapters.places):
        h = lora_shrink(x, adapters.a, ids, adapters.layer, implementation="xla")
        out = lora_expand(out, h, adapters.b, ids, adapters.layer, slices=adapters.slices, implementation="xla")
    return out
