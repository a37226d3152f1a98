"""Compiles the kernels of adapters beside products of many rows, at the shapes of models, for one card; prints name -> scratch, and
summary or error.

python -m tests.kernels.compile_tiled_lora CARD [N]: every N-th      (under support.gpu_program.gpu_python)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from lora_jax.kernels.cases import MODELS, Linear
from lora_jax.kernels.lora_items import ITEM
from lora_jax.kernels.rope_cache import HeadNorms, lora_rope_to_cache
from lora_jax.kernels.tile_items import most_tile_items
from lora_jax.kernels.tiled_expand import lora_add, lora_silu_mul
from lora_jax.kernels.tiled_lora import TileAdapters, h_shape, lora_shrink_tiles
from lora_jax.kernels.tuning import shrink_cut, tile_rows

from lora_jax.config import PLACE_RANK
from tests.kernels.compile_fused_lora import summary
from tests.kernels.compile_step_kernels import array

LAYERS, SLOTS, LINEARS, REQUESTS = 2, 8, 4, 64
# (model, head size, dtype, rank, rows): whole tiles of 32 rows, of 16; then rows that fill no tile.
KINDS = [
    ("llama2-7b", 128, "bfloat16", 16, 2048),
    ("llama2-7b", 128, "bfloat16", 16, 100),
    ("smollm2-135m", 64, "bfloat16", 64, 500),
    ("smollm2-135m", 64, "float32", 16, 500),
]


def adapters_of(linear: Linear, rows: int, rank: int, dtype: str) -> TileAdapters:
    """As an engine has them: above PLACE_RANK in places."""
    outputs, slices, itemsize = sum(linear.slices), len(linear.slices), jnp.dtype(dtype).itemsize
    place = min(rank, PLACE_RANK)
    pieces = rank // place
    block_t = tile_rows(rows, itemsize)
    room = most_tile_items(rows, block_t, REQUESTS, SLOTS, rank)
    a = array((LAYERS, SLOTS * pieces, slices * place, linear.inputs), dtype)
    b = array((LAYERS, SLOTS * pieces, place, outputs), dtype)
    places = array((SLOTS, pieces)) if pieces > 1 else None
    items = array((LINEARS, room + -(-rows // block_t), ITEM))
    return TileAdapters(a, b, array((rows,)), items, array(()), linear.slices, 1, block_t, places)


def scratch_bytes(linear: Linear, adapters: TileAdapters, rows: int) -> int:
    """Of the parts of h in float32."""
    slices, itemsize = len(linear.slices), adapters.a.dtype.itemsize
    cut = shrink_cut(rows, linear.inputs, adapters.block_t, slices, itemsize)
    return cut.parts * adapters.room * adapters.block_t * cut.width(slices) // cut.group * 4


def _rope_job(linear: Linear, size: int, rows: int, y: Any, h: Any, adapters: TileAdapters, norms: bool):
    heads, kv_heads = (width // size for width in linear.slices[:2])
    kv = array((rows // 16 + 2, 16, 2, kv_heads, size), y.dtype.name)
    rope, scales = (array((rows, size // 2), "float32"),) * 2, (array((size,), y.dtype.name),) * (2 * norms)

    def op(kv, y, h, adapters, rope, index, *scales):
        given = HeadNorms(*scales, 1e-5) if scales else None
        return lora_rope_to_cache(y, h, adapters, rope, kv, index, heads=heads, norms=given)

    return jax.jit(op, donate_argnums=0), (kv, y, h, adapters, rope, array((rows,)), *scales)


def jobs() -> Iterator[tuple[str, int, Any, tuple[Any, ...]]]:
    """(name, most bytes of scratch, function, operands), each linear's shrink and what adds its adapters."""
    for model, size, dtype, rank, rows in KINDS:
        for linear in MODELS[model][:4]:
            adapters, kind = adapters_of(linear, rows, rank, dtype), linear.name.split(".")[1]
            name = f"{linear.name}-{rows}-r{rank}-{dtype}"
            x, y = array((rows, linear.inputs), dtype), array((rows, sum(linear.slices)), dtype)
            h = h_shape(adapters)
            shrink = jax.jit(lora_shrink_tiles, donate_argnums=2)
            yield (
                f"shrink-{name}",
                scratch_bytes(linear, adapters, rows),
                shrink,
                (x, adapters, array((adapters.room,))),
            )
            if kind == "qkv":
                yield f"rope-{name}", 0, *_rope_job(linear, size, rows, y, h, adapters, norms=dtype == "float32")
            elif kind == "gate_up":
                yield f"silu-{name}", 0, jax.jit(lora_silu_mul), (y, h, adapters)
            else:
                yield f"add-{name}", 0, jax.jit(lora_add, donate_argnums=0), (y, h, adapters)


def main(card: str, every: str = "1") -> None:
    chosen = list(jobs())[:: int(every)]
    print(json.dumps({name: (scratch, summary(card, jitted, given)) for name, scratch, jitted, given in chosen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
