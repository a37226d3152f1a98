"""Compiles programs of `bench kernels MODEL` for one card: python -m tests.support.compile_layer_ops CARD CALLS."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
from lora_jax.kernels.tuned import TileTable

from lora_jax.bench import kernel_timing
from lora_jax.bench.layer_ops import LayerOp
from lora_jax.builder import one_layer_spec
from lora_jax.config import EngineArgs
from lora_jax.device import compiler_options, set_up_device
from tests.support import gpu_program

if __name__ == "__main__":
    card, calls = sys.argv[1], int(sys.argv[2])
    setup = dataclasses.replace(set_up_device("cpu", "xla", 0.9), implementation="triton")
    args = EngineArgs(model="llama-2-7b", load_format="dummy", dtype="bfloat16", enable_lora=True, max_num_seqs=64)
    spec = one_layer_spec(dataclasses.replace(args, max_model_len=512), setup, None, TileTable())
    options = compiler_options(SimpleNamespace(is_gpu=True), True, None) | kernel_timing.IN_ORDER
    found = {}
    for op in (LayerOp(spec, "qkv", 8, lora=True), LayerOp(spec, "down", 8), LayerOp(spec, "attention", 64)):

        def shapes(op=op):
            given = op.operands(1, calls)
            return given.fixed, tuple(given.rotating[:calls]), given.carry

        compiled = gpu_program.compile_for(card, op.program(), *jax.eval_shape(shapes), compiler_options=options)
        found[op.name] = gpu_program.summary(*compiled)
    print(json.dumps(found))
