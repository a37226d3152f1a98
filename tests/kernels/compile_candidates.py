"""Compiles kernels with other tiles than those that the rules pick, for one card; prints name -> summary or error.

python -m tests.kernels.compile_candidates CARD SHARED_BYTES [N [all]]: every N-th, of more shapes
(under support.gpu_program.gpu_python)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
from lora_jax.kernels.candidates import candidates
from lora_jax.kernels.cases import LINEARS, TIMED_ATTENTION, AttentionCase
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.skinny_matmul import skinny_matmul
from lora_jax.kernels.tuned import Recorder, TileTable, tiles_in_use

from tests.kernels import compile_fused_lora
from tests.kernels.compile_step_kernels import DONATED, _heads, array
from tests.support import gpu_program

Job = tuple[Any, tuple[Any, ...]]


def _attention(case: AttentionCase) -> Job:
    op = functools.partial(decode_attention, heads=case.heads, scale=0.1)
    given = *_heads(case, case.rows, 2), array((case.rows, case.pages)), array((case.rows,))
    return jax.jit(op, donate_argnums=DONATED["decode"]), (*given, array((case.rows * case.kv_heads,)))


def _with_adapters(name: str, rows: int, dtype: str = "bfloat16", rank: int = 16) -> Job:
    return compile_fused_lora.job(LINEARS[name], rows, rank, dtype)[1:]


def _plain(name: str, rows: int, dtype: str = "bfloat16") -> Job:
    linear = LINEARS[name]
    given = array((rows, linear.inputs), dtype), array((linear.inputs, sum(linear.slices)), dtype)
    return jax.jit(skinny_matmul), given


def jobs(every: bool) -> Iterator[tuple[str, tuple[str, ...], Job]]:
    """(name, rules whose candidates are compiled, job)."""
    tiles, gate_up, lora = ("matmul_tiles",), ("swiglu_tiles", "lora_tiles"), ("lora_tiles",)
    small = dataclasses.replace(TIMED_ATTENTION[0], heads=4, kv_heads=4)
    yield "product-7b-qkv-8", tiles, _plain("llama2-7b.qkv", 8)
    yield "swiglu-7b-64", gate_up, _with_adapters("llama2-7b.gate_up", 64)
    yield "residual-135m-8-float32", lora, _with_adapters("smollm2-135m.down", 8, "float32")
    yield "attention-c256", ("attention_tiles",), _attention(small)
    if not every:
        return
    for rows in (1, 64):
        for kind in ("qkv", "o", "down", "gate_up"):
            rules = gate_up if kind == "gate_up" else (*tiles, *lora)
            yield f"7b-{kind}-{rows}", rules, _with_adapters(f"llama2-7b.{kind}", rows)
        yield f"135m-{rows}-r64-float32", (*tiles, *lora), _with_adapters("smollm2-135m.down", rows, "float32", 64)
        yield f"product-8b-qkv-{rows}", tiles, _plain("llama3-8b.qkv", rows)
    for case in TIMED_ATTENTION[1:]:
        yield f"attention-{case.name}", ("attention_tiles",), _attention(case)


def keys_of(job: Job) -> list[Any]:
    seen = Recorder()
    with tiles_in_use(seen):
        jax.eval_shape(job[0], *job[1])
    return list(seen.keys)


def compiled(card: str, job: Job, key: Any, tiles: Any) -> dict[str, int] | str:
    try:
        with tiles_in_use(TileTable.of({key: tiles})):
            return gpu_program.summary(*gpu_program.compile_for(card, job[0], *job[1]))
    except Exception as error:  # reported with its name, so that one failure does not hide the others
        return f"{type(error).__name__}: {error}"[:500]


def main(card: str, shared: str, step: str = "1", *more: str) -> None:
    found = [
        (f"{name} {tiles}", job, key, tiles)
        for name, rules, job in jobs(bool(more))
        for key in keys_of(job)
        for tiles in (candidates(key, shared=int(shared)) if key.rule in rules else ())
    ]
    print(json.dumps({name: compiled(card, *what) for name, *what in found[:: int(step)]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
