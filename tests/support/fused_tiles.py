"""How a product with adapters inside is cut."""

from __future__ import annotations

from lora_jax.kernels.tuning import LoRATiles, lora_tiles, matmul_tiles, swiglu_tiles


def tiles_of(
    op: str, rows: int, inputs: int, slices: tuple[int, ...], items: int, rank: int, itemsize: int
) -> LoRATiles:
    """op: "skinny", "residual" or "swiglu"."""
    outputs, waits = sum(slices), op != "swiglu"
    if waits:
        columns = matmul_tiles(rows, inputs, outputs, itemsize, True).block_n
    else:
        columns = 2 * swiglu_tiles(rows, inputs, outputs // 2, itemsize).block_n
    return lora_tiles(rows, inputs, len(slices), items, rank, itemsize, columns, waits=waits)
