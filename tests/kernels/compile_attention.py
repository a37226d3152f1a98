"""Compiles decode attention of every case for one card: python -m tests.kernels.compile_attention CARD."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
from lora_jax.kernels.cases import ATTENTION_CASES, AttentionCase
from lora_jax.kernels.paged_attention import paged_decode_attention

from tests.support import gpu_program


def compile_case(card: str, case: AttentionCase) -> dict[str, int] | str:
    dtype, rows = jnp.dtype(case.dtype), case.rows
    kv = (rows * case.pages + 1, case.page_size, 2, case.kv_heads, case.head_dim)
    avals = [
        jax.ShapeDtypeStruct((rows, case.heads, case.head_dim), dtype),
        jax.ShapeDtypeStruct(kv, dtype),
        jax.ShapeDtypeStruct((rows, case.pages), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    ]
    jitted = jax.jit(lambda *args: paged_decode_attention(*args, scale=0.1, window=case.window))
    try:
        return gpu_program.summary(*gpu_program.compile_for(card, jitted, *avals))
    except Exception as error:  # reported with its case, so that one failure does not hide the others
        return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    print(json.dumps({case.name: compile_case(sys.argv[1], case) for case in ATTENTION_CASES}))
