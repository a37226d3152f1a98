"""Compiles the kernels of a step that are not LoRA's, at the shapes of models, for one card; prints name -> summary or error.

python -m tests.kernels.compile_step_kernels CARD [N]: every N-th      (under support.gpu_program.gpu_python)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.cases import ATTENTION_CASES, MODELS, TIMED_ATTENTION, AttentionCase
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.deferred_norm import DeferredNorm
from lora_jax.kernels.prefill_attention import BLOCK_TOKENS, prefill_attention
from lora_jax.kernels.residual_matmul import fits_residual, residual_matmul
from lora_jax.kernels.rope_cache import HeadNorms, rope_to_cache
from lora_jax.kernels.skinny_matmul import fits, skinny_matmul
from lora_jax.kernels.swiglu import swiglu
from lora_jax.kernels.tuning import matmul_tiles

from tests.support import gpu_program

ROWS = (1, 8, 64)
PREFILL = 500  # tokens: no multiple of any tile
HEAD_SIZES = (24, 64, 80, 96, 128, 256)
Job = tuple[Callable[..., Any], tuple[Any, ...]]
Jobs = dict[str, tuple[int, Job]]  # name -> (kernels that it may be, what to compile)
DONATED = {"decode": (2, 5), "rope": 2, "residual": 4}  # as in a step: pages, or they would be copied, and arrivals


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


def _attention_jobs() -> Jobs:
    out: Jobs = {}
    for i, case in enumerate(_attention_cases()):
        options = dict(heads=case.heads, scale=0.1, window=case.window, softcap=case.softcap)
        tables, rows = array((case.rows, case.pages)), array((case.rows,))
        op, parts = functools.partial(decode_attention, **options), 2 * (i % 2)
        given = (*_heads(case, case.rows, parts), tables, rows, array((case.rows * case.kv_heads,)))
        out[f"decode-{case.name}-s{parts}"] = 1, (op, given)
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
    return out


def norm_of(rows: int, size: int, dtype: str) -> DeferredNorm:
    """As `residual_matmul` gives it."""
    return DeferredNorm(array((rows, size), dtype), array((size // 64, rows), "float32"), 1e-5)


def _linears(kind: str) -> Iterator[tuple[int, int, str]]:
    """(inputs, outputs, dtype) of the models' linears of one kind that the kernels take; float32 too with 4096 inputs."""
    linears = (li for model in MODELS.values() for li in model if li.name.endswith(f".{kind}"))
    for inputs, outputs in sorted({(li.inputs, sum(li.slices)) for li in linears}):
        for dtype in ("bfloat16", "float32") if inputs == 4096 else ("bfloat16",):
            if fits(1, inputs, outputs):
                yield inputs, outputs, dtype


def _product_jobs() -> Jobs:
    """The products of models.layers. Up to 16 rows o and down add to the residual stream and leave a norm to qkv (but the first
    layer's) and to gate and up."""
    out: Jobs = {}
    for kind, rows in itertools.product(("qkv", "o", "down"), ROWS):
        for inputs, outputs, dtype in _linears(kind):
            name, few = f"{inputs}x{outputs}-{rows}-{dtype}", fits_residual(rows, inputs, outputs, jnp.dtype(dtype))
            x, w = array((rows, inputs), dtype), array((inputs, outputs), dtype)
            if kind == "qkv" or not few:
                out[f"product-{name}"] = 1, (skinny_matmul, (x, w))
            if kind == "qkv" and few:
                out[f"deferred-{name}"] = 1, (skinny_matmul, (norm_of(rows, inputs, dtype), w))
            if kind != "qkv" and few:
                given = x, w, array((rows, outputs), dtype), array((outputs,), dtype), array((outputs // 64,))
                out[f"residual-{name}"] = 1, (functools.partial(residual_matmul, eps=1e-5), given)
    for inputs, outputs, dtype in _linears("gate_up"):
        for rows in ROWS:
            x = norm_of(rows, inputs, dtype) if rows <= 16 else array((rows, inputs), dtype)
            out[f"swiglu-{inputs}x{outputs}-{rows}-{dtype}"] = 1, (swiglu, (x, array((inputs, outputs), dtype)))
    return out


def _norm_jobs() -> Jobs:
    out: Jobs = {}
    sizes = {linear.inputs for model in MODELS.values() for linear in model if not linear.name.endswith(".down")}
    for size in sorted(sizes | {8192}):
        for rows in (*ROWS, PREFILL):
            parts = matmul_tiles(rows, size, size, 2).parts if fits(rows, size, size) else 0
            y = array((parts, rows, size), "float32") if parts else array((rows, size), "bfloat16")
            given = array((rows, size), "bfloat16"), y, array((size,), "bfloat16")
            out[f"norm-{size}-{rows}"] = 1, (functools.partial(add_rms_norm, eps=1e-5), given)
    return out


def jobs() -> Jobs:
    return _attention_jobs() | _product_jobs() | _norm_jobs()


def compile_job(card: str, name: str, job: Job) -> dict[str, int] | str:
    function, given = job
    jitted = jax.jit(function, donate_argnums=DONATED.get(name.split("-")[0], ()))
    try:
        return gpu_program.summary(*gpu_program.compile_for(card, jitted, *given))
    except Exception as error:  # reported with its name, so that one failure does not hide the others
        return f"{type(error).__name__}: {error}"[:500]


def main(card: str, every: str = "1") -> None:
    chosen = list(jobs().items())[:: int(every)]
    print(json.dumps({name: (kernels, compile_job(card, name, job)) for name, (kernels, job) in chosen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
