"""Every step with adapters of a GPU's engine can be traced, whatever the largest rank and whichever tiles are stored."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from lora_jax.kernels import candidates
from lora_jax.kernels.tuned import Key, TileTable

from lora_jax.builder import one_layer_spec
from lora_jax.config import EngineArgs
from lora_jax.device import set_up_device
from lora_jax.models.llama import hf_plan
from lora_jax.spec import RuntimeSpec, step_entries
from lora_jax.step_keys import StepKey


def spec_of(rank: int, loras: int, tiles: TileTable | None = None) -> RuntimeSpec:
    setup = dataclasses.replace(set_up_device("cpu", "xla", 0.9), implementation="triton")
    sizes = dict(max_num_seqs=32, max_model_len=256, max_loras=loras, max_lora_rank=rank)
    args = EngineArgs(model="smollm2-135m", load_format="dummy", dtype="bfloat16", enable_lora=True, **sizes)
    return one_layer_spec(args, setup, None, tiles or TileTable())


def trace(spec: RuntimeSpec, wanted=lambda key: True) -> list[StepKey]:
    plan = hf_plan(spec.model)
    params = tuple(jax.ShapeDtypeStruct(plan[path].shape, spec.dtype) for path in spec.definition.paths)
    entries = step_entries(spec, params)
    keys = [key for key in entries if key.phase in ("decode", "prefill") and key.lora and wanted(key)]
    for key in keys:
        jax.eval_shape(entries[key].fn, *entries[key].args)
    return keys


@pytest.mark.parametrize("rank", [8, 16, 32, 64, 65, 256])
def test_steps_of_any_rank(rank):
    keys = trace(spec_of(rank, 8))
    assert {key.bucket for key in keys if key.phase == "decode"} == {1, 2, 4, 8, 16, 32}
    assert {key.items for key in keys} == ({0, 8} if rank > 16 else {0}) | ({64} if rank > 128 else set())


def test_steps_with_stored_tiles():
    key = Key("lora_tiles", (16, 576, 1, 16, 16, 2, 64, True))
    found = candidates.candidates(key, None, candidates.LARGEST_CARD)
    assert len(found) >= 3
    for tiles in found:
        spec = dataclasses.replace(spec_of(16, 16), lora_tiles=TileTable.of({key: tiles}))
        assert trace(spec, lambda step: step.phase == "decode" and step.bucket == 16)
