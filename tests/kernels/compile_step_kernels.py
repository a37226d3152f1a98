"""Compiles the kernels of a step that are not LoRA's, at the shapes of models, for one card; prints name -> summary or error.

python -m tests.kernels.compile_step_kernels CARD [N]: every N-th      (under support.gpu_program.gpu_python)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.cases import ATTENTION_CASES, MODELS, TIMED_ATTENTION, AttentionCase
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.prefill_attention import BLOCK_TOKENS, prefill_attention
from lora_jax.kernels.rope_cache import HeadNorms, rope_to_cache
from lora_jax.kernels.skinny_matmul import fits, skinny_matmul
from lora_jax.kernels.tuning import attention_tiles, matmul_tiles

from tests.support import gpu_program

ROWS = (1, 8, 64)
JOINED = 5  # kernels at most where a row's context is split: XLA puts the parts together
PREFILL = 500  # tokens: no multiple of any tile
HEAD_SIZES = (24, 64, 80, 96, 128, 256)
Job = tuple[Callable[..., Any], tuple[Any, ...]]


def array(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention_cases() -> list[AttentionCase]:
    """Those of cases.py at several numbers of rows, and every head size in every dtype."""
    out = [dataclasses.replace(c, rows=r, name=f"{c.name}-{r}") for c in ATTENTION_CASES for r in ROWS]
    out += TIMED_ATTENTION
    for size, dtype in itertools.product(HEAD_SIZES, ("bfloat16", "float32")):
        for heads, pages in ((8, 16), (8, 256), (2, 256)):
            out.append(AttentionCase(f"d{size}-{dtype}-h{heads}-p{pages}", 8, 8, heads, size, 16, pages, dtype=dtype))
    return out


def _heads(case: AttentionCase, tokens: int, parts: int) -> tuple[Any, ...]:
    """qkv, rope, kv."""
    width, pages = (case.heads + 2 * case.kv_heads) * case.head_dim, case.rows * case.pages + 1
    qkv = array((parts, tokens, width), "float32") if parts else array((tokens, width), case.dtype)
    kv = array((pages, case.page_size, 2, case.kv_heads, case.head_dim), case.dtype)
    return qkv, (array((tokens, case.head_dim // 2), "float32"),) * 2, kv


def jobs() -> dict[str, tuple[int, Job]]:
    """name -> (kernels that it may be, what to compile)."""
    out: dict[str, tuple[int, Job]] = {}
    for i, case in enumerate(_attention_cases()):
        options = dict(heads=case.heads, scale=0.1, window=case.window, softcap=case.softcap)
        tables, rows = array((case.rows, case.pages)), array((case.rows,))
        context, item = case.pages * case.page_size, jnp.dtype(case.dtype).itemsize
        tiles = attention_tiles(case.rows, case.kv_heads, case.heads // case.kv_heads, context, case.head_dim, item)
        op, parts = functools.partial(decode_attention, **options), 2 * (i % 2)
        given = (*_heads(case, case.rows, parts), tables, rows)
        out[f"decode-{case.name}-s{parts}"] = 1 if tiles.parts == 1 else JOINED, (op, given)
        if case.name.endswith(("-8", "-p16")):
            q, ids = array((PREFILL, case.heads, case.head_dim), case.dtype), array((PREFILL,))
            kv, lists = _heads(case, 1, 0)[2], (array((3, 64)), array((4, PREFILL // BLOCK_TOKENS + 4)))
            op = functools.partial(prefill_attention, scale=0.1, window=case.window, softcap=case.softcap)
            out[f"prefill-{case.name}"] = 1, (op, (q, kv, ids, ids, *lists))
            out[f"rope-{case.name}"] = (
                1,
                (
                    functools.partial(rope_to_cache, heads=case.heads),
                    (*_heads(case, PREFILL, 0), ids),
                ),
            )
            scale = array((case.head_dim,), case.dtype)
            with_norms = lambda qkv, rope, kv, ids, q, k, heads=case.heads: rope_to_cache(  # noqa: E731
                qkv, rope, kv, ids, heads=heads, norms=HeadNorms(q, k, 1e-5)
            )
            out[f"rope-norms-{case.name}"] = 1, (with_norms, (*_heads(case, PREFILL, 0), ids, scale, scale))
    shapes = {
        (li.inputs, sum(li.slices)) for model in MODELS.values() for li in model if not li.name.endswith("lm_head")
    }
    for inputs, outputs in sorted(shapes):
        for rows in ROWS:
            for dtype in ("bfloat16", "float32") if inputs == 4096 else ("bfloat16",):
                if fits(rows, inputs, outputs):
                    given = array((rows, inputs), dtype), array((inputs, outputs), dtype)
                    out[f"product-{inputs}x{outputs}-{rows}-{dtype}"] = 1, (skinny_matmul, given)
    for size in sorted({size for size, _ in shapes} | {8192}):
        for rows in (*ROWS, PREFILL):
            parts = matmul_tiles(rows, size, size, 2).parts if fits(rows, size, size) else 0
            y = array((parts, rows, size), "float32") if parts else array((rows, size), "bfloat16")
            given = array((rows, size), "bfloat16"), y, array((size,), "bfloat16")
            out[f"norm-{size}-{rows}"] = 1, (functools.partial(add_rms_norm, eps=1e-5), given)
    return out


def compile_job(card: str, name: str, job: Job) -> dict[str, int] | str:
    function, given = job
    # pages are donated in a step, or they would be copied
    donated = {"decode": (2,), "rope": (2,)}.get(name.split("-")[0], ())
    try:
        return gpu_program.summary(*gpu_program.compile_for(card, jax.jit(function, donate_argnums=donated), *given))
    except Exception as error:  # reported with its name, so that one failure does not hide the others
        return f"{type(error).__name__}: {error}"[:500]


def main(card: str, every: str = "1") -> None:
    chosen = list(jobs().items())[:: int(every)]
    print(json.dumps({name: (kernels, compile_job(card, name, job)) for name, (kernels, job) in chosen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
