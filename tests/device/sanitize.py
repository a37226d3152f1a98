"""Every kernel once or twice on small operands, for tools that watch a card's memory:

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck --error-exitcode 9 python tests/device/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/device/sanitize.py        # shared memory

With that allocator every array is an allocation of its own, so that a read beyond its end is one that the tool sees. Results are
compared with float64 as well. `lora_shrink` and `lora_expand` are in the list of kernels_on_gpu.py. --form interpret runs this
list on any backend; --only NAME a part of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from lora_jax.kernels.cases import AttentionCase
from lora_jax.kernels.prefill_attention import BLOCK_TOKENS

from tests.support import attention_oracle, placed
from tests.support import fused_lora_checks as fused
from tests.support import kernel_checks as checks
from tests.support import tiled_lora_checks as tiled

ONE_HEAD = AttentionCase("one-head", 3, 8, 8, 24, 4, 37)
GROUPED = AttentionCase("grouped", 3, 12, 4, 64, 4, 37)
SHAPES = {"skinny": (128, 64, 64), "residual": (128,), "swiglu": (128, 128)}


def _fused(op: str, rows: int) -> Callable[[str], object]:
    case = fused.Case(op, rows, 576, SHAPES[op], "bfloat16", 9 if op != "residual" and rows <= 16 else None)
    slots = [(1, -1, 3, 1, 5, 2, 4, 0)[t % 8] for t in range(rows)]
    return lambda form: fused.check(fused.make(case, slots, 1), form)


def _together(form: str) -> None:
    """A program expands several tiles."""
    case = fused.Case(
        "skinny", 33, 576, (512, 256, 256), "bfloat16", None, ((16, 9, 5, 16, 0, 1),) * len(fused.OPS), 16
    )
    fused.check(fused.make(case, [t % 7 - 1 for t in range(33)], 1), form)


def _places(form: str) -> None:
    for op, rows in (("skinny", 5), ("skinny", 33), ("swiglu", 33)):
        placed.check_product(fused.Case(op, rows, 576, SHAPES[op], "bfloat16"), form)
    placed.check_tiles((48, 32, 32), form)


def _tiles(form: str) -> None:
    ids = tiled.mixed_ids(100)  # the last tile is not full
    how = {} if form == "triton" else dict(interpret=True)
    tiled.check_add(tiled.Case((128,), 576, ids, jnp.bfloat16), how)
    tiled.check_silu_mul(tiled.Case((192, 192), 576, ids, jnp.bfloat16), how)
    tiled.check_rope(tiled.Case((192, 64, 64), 576, ids, jnp.bfloat16), how, 6, 2, True)


def _prefill(form: str) -> None:
    spans = ((0, 1), (10, 9), (3, BLOCK_TOKENS), (37, BLOCK_TOKENS + 22))
    given = attention_oracle.prefill_inputs(GROUPED, spans, 160, BLOCK_TOKENS, norms=True, parts=2)
    checks.check_prefill(given, form, window=None, softcap=None)


CHECKS: dict[str, Callable[[str], object]] = {
    "norm": lambda form: checks.check_norm(5, 576, "bfloat16", 2, form),
    "product-few": lambda form: checks.check_matmul(5, 448, 192, "bfloat16", form, blocks=7),
    "product-many": lambda form: checks.check_matmul(33, 448, 192, "bfloat16", form),
    "swiglu": lambda form: checks.check_swiglu(5, 448, 320, "bfloat16", form, blocks=7),
    "residual": lambda form: checks.check_residual(5, 2048, 192, "bfloat16", form),
    "decode-attention": lambda form: checks.check_decode(ONE_HEAD, form, parts=2),
    "decode-attention-grouped": lambda form: checks.check_decode(GROUPED, form, norms=True),
    "prefill-attention": _prefill,
    "adapters-tiles": _tiles,
    "adapters-together": _together,
    "adapters-places": _places,
    **{
        f"adapters-{op}-{rows}": _fused(op, rows) for op in SHAPES for rows in (5, 33) if (op, rows) != ("residual", 33)
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=("triton", "interpret"), default="triton")
    parser.add_argument("--only", default="", metavar="NAME")
    args = parser.parse_args()
    names = [name for name in CHECKS if args.only in name]
    if not names:
        parser.error(f"--only {args.only}: there are {', '.join(CHECKS)}")
    for name in names:
        start = time.perf_counter()
        CHECKS[name](args.form)
        print(f"{name}: right, {time.perf_counter() - start:.1f} s", flush=True)
    print(f"{len(names)} checks on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
