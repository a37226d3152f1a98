"""Compiles the kernels of every case, or of every n-th, for one card; prints a JSON object, case id -> summary or error.

python -m tests.kernels.compile_cases CARD [N]      (under support.gpu_program.gpu_python)
"""

from __future__ import annotations

import functools
import json
import sys

import jax
import jax.numpy as jnp
from lora_jax.kernels import lora_expand, lora_shrink
from lora_jax.kernels.cases import CASES, Case

from tests.support import gpu_program


def lora(x, a, b, y, slot_ids, layer, *, slices: tuple[int, ...]):
    h = lora_shrink(x, a, slot_ids, layer, implementation="triton")
    return lora_expand(y, h, b, slot_ids, layer, slices=slices, implementation="triton")


def avals(case: Case) -> list[jax.ShapeDtypeStruct]:
    """x, a, b, y, slot_ids, layer."""
    linear, dtype = case.linear, jnp.dtype(case.dtype)
    columns, ranks = sum(linear.slices), len(linear.slices) * case.rank
    return [
        jax.ShapeDtypeStruct((case.rows, linear.inputs), dtype),
        jax.ShapeDtypeStruct((case.layers, case.slots, ranks, linear.inputs), dtype),
        jax.ShapeDtypeStruct((case.layers, case.slots, case.rank, columns), dtype),
        jax.ShapeDtypeStruct((case.rows, columns), dtype),
        jax.ShapeDtypeStruct((case.rows,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    ]


def compile_case(card: str, case: Case) -> dict[str, int] | str:
    jitted = jax.jit(functools.partial(lora, slices=case.linear.slices), donate_argnums=3)
    try:
        return gpu_program.summary(*gpu_program.compile_for(card, jitted, *avals(case)))
    except Exception as error:  # reported with its case, so that one failure does not hide the others
        return f"{type(error).__name__}: {error}"[:500]


def main(card: str, every: str = "1") -> None:
    print(json.dumps({case.id: compile_case(card, case) for case in CASES[:: int(every)]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
