"""The steps as an H200 would run them, compiled here without one: idle LoRA is the plain program, a decode step is one
command buffer, and the number of kernels is written down so that a broken fusion is noticed."""

from __future__ import annotations

import pytest

from tests.support.gpu_program import run_compiler

LAYERS = (2, 4)
# Kernels of one decoder layer (attention, its products and norms), per variant; XLA's fusion decides most of them.
KERNELS_A_LAYER = {"decode[8]": 12.5, "decode[8]+lora": 25.0}
# An expand and a shrink for each of the four fused linears and the head, an expand for the embedding.
DISTINCT_KERNELS = {"decode[8]": 0, "decode[8]+lora": 11}


@pytest.fixture(scope="module")
def programs() -> dict:
    return run_compiler("tests.support.step_programs", "h200", *map(str, LAYERS), timeout=280)


def test_idle_lora_runs_the_plain_program(programs):
    two = programs["2"]
    assert two["plain"]["decode[8]"]["hash"] == two["lora"]["decode[8]"]["hash"]
    assert two["plain"]["prefill[512]"]["hash"] == two["lora_prefill"]["prefill[512]"]["hash"]
    assert two["lora"]["decode[8]"]["hash"] != two["lora"]["decode[8]+lora"]["hash"]


def test_a_decode_step_is_one_command_buffer(programs):
    for layers in programs.values():
        for key, program in layers["lora"].items():
            assert program["command_buffers"] == 1 and "kCommandBuffer" in program["first"], (key, program)
            assert not program["other_thunks"], f"{key}: {program['other_thunks']} are outside of the graph"


@pytest.mark.parametrize("key", KERNELS_A_LAYER)
def test_kernels_a_layer(programs, key):
    few, many = (programs[str(n)]["lora"][key]["kernels"] for n in LAYERS)
    assert (many - few) / (LAYERS[1] - LAYERS[0]) == KERNELS_A_LAYER[key]


@pytest.mark.parametrize("key", DISTINCT_KERNELS)
def test_distinct_kernels_do_not_grow_with_the_layers(programs, key):
    for n in LAYERS:
        assert programs[str(n)]["lora"][key]["distinct_lora_kernels"] == DISTINCT_KERNELS[key]


def test_a_step_copies_no_adapter_stack(programs):
    """Temporaries stay far below one layer's stack (8 slots x 48 x 4096 bfloat16 is 3.1 MB for q, k and v alone)."""
    for layers in programs.values():
        extra = layers["lora"]["decode[8]+lora"]["temp_bytes"] - layers["lora"]["decode[8]"]["temp_bytes"]
        assert extra < 1_000_000, extra
