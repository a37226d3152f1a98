"""The steps as an H200 would run them, compiled here without one: idle LoRA is the plain program, a step is one command
buffer, and the number of kernels is written down so that a broken fusion is noticed."""

from __future__ import annotations

import pytest

from tests.support.gpu_program import run_compiler

LAYERS = (2, 4)
# Kernels of one decoder layer, per variant. Plain decode, up to 16 rows: qkv, attention, o with the residual stream and the norm
# after it, gate and up, down as o; with more rows two norms of their own.
# Adapters add none: they are computed inside the four products. Prefill has norms of its own, rotates and writes in one more, and
# silu * mul in another. With few tokens adapters add no kernel there either, with many a shrink for each of the four products, and
# an add after o and down: qkv's and gate_up's are added by the kernels that rotate, and that apply silu.
KERNELS_A_LAYER = {
    "decode[1]": 5,
    "decode[8]": 5,
    "decode[64]": 7,
    "prefill[32]": 9,
    "prefill[512]": 9,
    "decode[1]+lora": 5,
    "decode[8]+lora": 5,
    "decode[64]+lora": 7,
    "prefill[32]+lora": 9,
    "prefill[512]+lora": 9 + 4 + 2,
}
# And of the rest. The last three choose the token: two to find the largest logit, one to leave it for the next step.
KERNELS_BESIDE_LAYERS = {
    "decode[1]": 10,
    "decode[8]": 12,
    "decode[64]": 9,
    "prefill[32]": 8,
    "prefill[512]": 8,
    "decode[1]+lora": 14,
    "decode[8]+lora": 16,
    "decode[64]+lora": 14,
    "prefill[32]+lora": 14,
    "prefill[512]+lora": 14,
}
# A shrink and an expand of the head, an expand of the embedding. In a prefill of many tokens also a shrink for each of the four
# fused linears, which o and down add alone and the others as they rotate, and as they apply silu.
DISTINCT_KERNELS = {
    "decode[8]": 0,
    "decode[8]+lora": 3,
    "prefill[32]": 0,
    "prefill[32]+lora": 3,
    "prefill[512]": 0,
    "prefill[512]+lora": 3 + 4 + 2 + 1 + 1,
}
CACHE_BYTES = 4096 * 16 * 2 * 32 * 128 * 2  # pages of one layer in tests.support.step_programs


@pytest.fixture(scope="module")
def programs() -> dict:
    return run_compiler("tests.support.step_programs", "h200", *map(str, LAYERS), timeout=280)


def test_idle_lora_runs_the_plain_program(programs):
    two = programs["2"]
    assert two["plain"]["decode[8]"]["hash"] == two["lora"]["decode[8]"]["hash"]
    assert two["plain"]["prefill[512]"]["hash"] == two["lora"]["prefill[512]"]["hash"]
    for key in ("decode[8]", "prefill[512]"):
        assert two["lora"][key]["hash"] != two["lora"][f"{key}+lora"]["hash"]


def test_a_step_is_one_command_buffer_that_holds_everything(programs):
    """Decode and prefill, with and without adapters: nothing is launched beside the graph, and no loop is left."""
    for layers in programs.values():
        assert set(layers["lora"]) == set(KERNELS_A_LAYER)
        for key, program in [*layers["lora"].items(), *layers["plain"].items()]:
            assert program["command_buffers"] == 1 and program["outermost"] == ["kCommandBuffer"], (key, program)
            assert program["kernels"] >= 16 and not program["other_thunks"], (key, program)


@pytest.mark.parametrize("key", KERNELS_A_LAYER)
def test_kernels_a_layer(programs, key):
    few, many = (programs[str(n)]["lora"][key]["kernels"] for n in LAYERS)
    assert (many - few) / (LAYERS[1] - LAYERS[0]) == KERNELS_A_LAYER[key]
    assert few - LAYERS[0] * KERNELS_A_LAYER[key] == KERNELS_BESIDE_LAYERS[key]


@pytest.mark.parametrize("key", DISTINCT_KERNELS)
def test_distinct_kernels_do_not_grow_with_the_layers(programs, key):
    for n in LAYERS:
        assert programs[str(n)]["lora"][key]["distinct_lora_kernels"] == DISTINCT_KERNELS[key]


def test_a_step_copies_no_pages(programs):
    for layers in programs.values():
        for key, program in layers["lora"].items():
            assert program["temp_bytes"] < CACHE_BYTES // 8, (key, program)


def test_a_step_copies_no_adapter_stack(programs):
    """Temporaries stay far below one layer's stack (8 slots x 48 x 4096 bfloat16 is 3.1 MB for q, k and v alone)."""
    for layers in programs.values():
        extra = layers["lora"]["decode[8]+lora"]["temp_bytes"] - layers["lora"]["decode[8]"]["temp_bytes"]
        assert extra < 1_000_000, extra
