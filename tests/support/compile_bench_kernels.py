"""Compiles the programs that `bench kernels` times for one card: python -m tests.support.compile_bench_kernels CARD CALLS."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from lora_jax.kernels import lora_shrink
from lora_jax.kernels.cases import TIMED_ATTENTION, TIMED_CASES

from lora_jax.bench import kernel_timing
from lora_jax.device import compiler_options
from tests.support import gpu_program


def avals(op: str, case: Any, calls: int) -> tuple[Any, ...]:
    """Shapes of the loop's arguments; weights of many layers."""

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    if op == "attention":
        kv = array((case.rows * case.pages, case.page_size, 2, case.kv_heads, case.head_dim), case.dtype)
        qkv = array((case.rows, (case.heads + 2 * case.kv_heads) * case.head_dim), case.dtype)
        rope = (array((case.rows, case.head_dim // 2), "float32"),) * 2
        carry = [kv, array((case.rows * case.kv_heads,), "int32")]
        return (qkv, rope, array((case.rows,), "int32")), (array((case.rows, case.pages), "int32"),) * calls, carry
    rank, ids, layer = case.rank * len(case.linear.slices), array((case.rows,), "int32"), array((), "int32")
    x, a = (
        array((case.rows, case.linear.inputs), case.dtype),
        array((40, case.slots, rank, case.linear.inputs), case.dtype),
    )
    if op == "shrink":
        return (x, a, ids), (layer,) * calls, []
    h = jax.eval_shape(lora_shrink, x, a, ids, layer)
    columns = sum(case.linear.slices)
    b = array((40, case.slots, case.rank, columns), case.dtype)
    return (array(h.shape, "float32"), b, ids), (layer,) * calls, [array((case.rows, columns), case.dtype)]


if __name__ == "__main__":
    card, calls = sys.argv[1], int(sys.argv[2])
    options = compiler_options(SimpleNamespace(is_gpu=True), True, None) | kernel_timing.IN_ORDER
    large = next(case for case in TIMED_ATTENTION if case.name == "llama2-7b-b64-c2048")
    found = {}
    for op, case in (("shrink", TIMED_CASES[0]), ("expand", TIMED_CASES[0]), ("attention", large)):
        looped = kernel_timing.looped(op, case, "triton")
        compiled = gpu_program.compile_for(card, looped, *avals(op, case, calls), compiler_options=options)
        found[op] = gpu_program.summary(*compiled)
    assert jnp.dtype(large.dtype).itemsize == 2
    print(json.dumps(found))
