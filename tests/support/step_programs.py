"""What a card would run for the steps of a Llama-2-7B shaped model, as JSON on standard output.

Runs in the interpreter that `gpu_program` speaks of: python -m tests.support.step_programs CARD LAYERS...
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lora_jax.config import CacheConfig, LoRAConfig, SchedulerConfig
from lora_jax.device import COMMAND_BUFFER_KINDS, DeviceSetup
from lora_jax.models.llama import hf_plan
from lora_jax.models.shapes import known_shape
from lora_jax.spec import RuntimeSpec, make_spec, step_entries
from lora_jax.step_keys import StepKey
from tests.support import gpu_program

OPTIONS = {"xla_gpu_enable_command_buffer": COMMAND_BUFFER_KINDS, "xla_gpu_graph_min_graph_size": 1}


def spec_of(layers: int, lora: bool) -> RuntimeSpec:
    model = dataclasses.replace(known_shape("llama-2-7b"), num_layers=layers, layer_windows=(None,) * layers)
    cpu = jax.devices("cpu")[0]  # only shapes are made; the programs are for the card
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,), devices=[cpu])
    setup = DeviceSetup(cpu, mesh, NamedSharding(mesh, PartitionSpec()), "triton")
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
    return make_spec(
        model, jnp.dtype("bfloat16"), setup, scheduler, CacheConfig(16, 4096), LoRAConfig(8, 16, 8) if lora else None
    )


def programs(card: str, layers: int, lora: bool, keys: list[StepKey]) -> dict[str, dict]:
    spec = spec_of(layers, lora)
    shapes = {path: jax.ShapeDtypeStruct(hf.shape, jnp.bfloat16) for path, hf in hf_plan(spec.model).items()}
    entries = step_entries(spec, tuple(shapes[path] for path in spec.definition.paths))
    out = {}
    for key in keys:
        entry = entries[key]
        jitted = jax.jit(entry.fn, donate_argnums=entry.donate)
        compiled, thunks = gpu_program.compile_for(card, jitted, *entry.args, compiler_options=OPTIONS)
        kinds = set(re.findall(r"k[A-Z]\w+", thunks)) - {"kCustomKernel", "kKernel", "kCommandBuffer", "kCopy", "kGemm"}
        out[str(key)] = {
            **gpu_program.summary(compiled, thunks),
            "hash": gpu_program.program_hash(compiled),
            "outermost": re.findall(r"^\d+: (\w+)", thunks, re.MULTILINE),
            "other_thunks": sorted(kinds),
            "distinct_lora_kernels": _distinct(compiled.as_text()),
        }
    return out


def _distinct(hlo: str) -> int:
    """LoRA kernels that differ: calls whose configuration (the kernel's code) is the same count once."""
    calls = re.findall(r"custom-call\(.*?custom_call_target=\"__gpu\$xla\.gpu\.triton\".*?backend_config=(.*)", hlo)
    return len({c for c in calls if re.search("lora_(shrink|expand|add|silu|rope)", c)})


if __name__ == "__main__":
    card, *layers = sys.argv[1:]
    keys = [StepKey("decode", b, lora) for b in (1, 8, 64) for lora in (False, True)]
    keys += [StepKey("prefill", b, lora) for b in (32, 512) for lora in (False, True)]
    plain = [StepKey("decode", 8), StepKey("prefill", 512)]
    result = {
        str(n): {
            "lora": programs(card, int(n), True, keys),
            "plain": programs(card, int(n), False, plain if i == 0 else []),
        }
        for i, n in enumerate(layers)
    }
    print(json.dumps(result))
