"""Compiles products with adapters inside, at the shapes of models, for one card; prints name -> summary or error, and scratch.

python -m tests.kernels.compile_fused_lora CARD [N]: every N-th      (under support.gpu_program.gpu_python)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from lora_jax.kernels.adapters import Adapters, adapter_counters
from lora_jax.kernels.cases import MODELS, Linear
from lora_jax.kernels.lora_items import FIELDS, ITEM, most_items
from lora_jax.kernels.residual_matmul import MAX_ROWS, fits_residual, residual_matmul
from lora_jax.kernels.skinny_matmul import skinny_lora_matmul
from lora_jax.kernels.swiglu import lora_swiglu
from lora_jax.kernels.tuning import matmul_tiles

from lora_jax.config import PLACE_RANK
from tests.kernels.compile_step_kernels import array, norm_of
from tests.support import gpu_program
from tests.support.fused_tiles import tiles_of

ROWS = (8, 64)
LAYERS, SLOTS, LINEARS = 2, 8, 4
KINDS = [("llama2-7b", "bfloat16", 16), ("smollm2-135m", "bfloat16", 64), ("smollm2-135m", "float32", 16)]


def adapters_of(linear: Linear, rows: int, rank: int, dtype: str) -> Adapters:
    """As an engine has them: above PLACE_RANK in places."""
    outputs, slices, place = sum(linear.slices), len(linear.slices), min(rank, PLACE_RANK)
    pieces = rank // place
    return Adapters(
        a=array((LAYERS, SLOTS * pieces, slices * place, linear.inputs), dtype),
        b=array((LAYERS, SLOTS * pieces, place, outputs), dtype),
        slot_ids=array((rows,)),
        items=array((LINEARS, most_items(SLOTS, rank) * FIELDS)),
        layer=array(()),
        slices=linear.slices,
        linear=1,
        places=array((SLOTS, pieces)) if pieces > 1 else None,
    )


def scratch_bytes(linear: Linear, rows: int, rank: int, dtype: str) -> int:
    """Of the parts of h in float32; of a residual product's parts too."""
    slices, items, itemsize = len(linear.slices), most_items(SLOTS, rank), jnp.dtype(dtype).itemsize
    op = "swiglu" if linear.name.endswith("gate_up") else "skinny"
    tiles = tiles_of(op, rows, linear.inputs, linear.slices, items, rank, itemsize)
    own = max(ITEM, rank)
    joined = (items * ITEM if rows <= 16 or rank > ITEM else own) if tiles.joined else 0
    h = (tiles.parts * own + joined) * slices * rows * 4
    outputs = sum(linear.slices)
    sums = (matmul_tiles(rows, linear.inputs, outputs, itemsize, adapters=True).parts + 1) * rows * outputs * 4
    return h + (sums if slices == 1 and rows <= MAX_ROWS else 0)


def job(linear: Linear, rows: int, rank: int, dtype: str) -> tuple[str, Any, tuple[Any, ...]]:
    """Name, jitted function that gives up its arrivals, and what it takes. As in a step: with few rows norms are left to the
    products, and o and down add to the stream."""
    kind, outputs = linear.name.split(".")[1], sum(linear.slices)
    few = fits_residual(rows, linear.inputs, outputs, jnp.dtype(dtype))
    adapters, w = adapters_of(linear, rows, rank, dtype), array((linear.inputs, outputs), dtype)
    arrivals = array((outputs // 64 + adapter_counters(adapters.items, LAYERS),))
    x = array((rows, linear.inputs), dtype)
    if few and kind in ("o", "down"):
        residual = lambda x, w, stream, scale, adapters, arrivals: residual_matmul(  # noqa: E731
            x, w, stream, scale, arrivals, eps=1e-5, adapters=adapters
        )
        given = x, w, array((rows, outputs), dtype), array((outputs,), dtype), adapters, arrivals
        return "residual", jax.jit(residual, donate_argnums=5), given
    op = lora_swiglu if kind == "gate_up" else skinny_lora_matmul
    normed = norm_of(rows, linear.inputs, dtype) if few else x
    name = "swiglu" if kind == "gate_up" else "product"
    return name, jax.jit(op, donate_argnums=3), (normed, w, adapters, arrivals)


def jobs() -> Iterator[tuple[str, int, Any, tuple[Any, ...]]]:
    """(name, most bytes of scratch, function, operands)."""
    for model, dtype, rank in KINDS:
        for linear in MODELS[model][:4]:
            for rows in ROWS:
                name, jitted, given = job(linear, rows, rank, dtype)
                scratch = scratch_bytes(linear, rows, rank, dtype)
                yield f"{name}-{linear.name}-{rows}-r{rank}-{dtype}", scratch, jitted, given


def summary(card: str, jitted: Any, given: tuple[Any, ...]) -> dict[str, int] | str:
    try:
        return gpu_program.summary(*gpu_program.compile_for(card, jitted, *given))
    except Exception as error:  # reported with its name, so that one failure does not hide the others
        return f"{type(error).__name__}: {error}"[:500]


def main(card: str, every: str = "1") -> None:
    chosen = list(jobs())[:: int(every)]
    print(json.dumps({name: (scratch, summary(card, jitted, given)) for name, scratch, jitted, given in chosen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
