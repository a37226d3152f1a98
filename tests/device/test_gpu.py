"""What only an NVIDIA GPU can show. Run there: python -m pytest -m device tests/device"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lora_jax.kernels import decode_attention
from lora_jax.kernels.cases import ATTENTION_CASES, LINEARS, AttentionCase
from lora_jax.kernels.prefill_attention import BLOCK_TOKENS
from lora_jax.kernels.tuning import AttentionTiles

from tests.support import attention_oracle, tiny
from tests.support import fused_lora_checks as fused
from tests.support import kernel_checks as checks

pytestmark = pytest.mark.device
ROOT = Path(__file__).resolve().parents[2]
ONE_HEAD = AttentionCase("one-head", 3, 8, 8, 24, 4, 37)  # a query head a KV head, an odd head size and table
GROUPED = AttentionCase("grouped", 3, 12, 4, 64, 4, 37)


def test_lora_kernels_equal_float64():
    script = str(ROOT / "tests" / "device" / "kernels_on_gpu.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]


# ---- the kernels of a step, compiled ----
@pytest.mark.parametrize("kind", [dict(), dict(parts=3, norms=True)], ids=["plain", "parts-norms"])
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda c: c.name)
def test_decode_attention_equals_float64(case, kind):
    checks.check_decode(case, "triton", **kind)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda c: c.name)
def test_plain_jax_attention_equals_float64(case):
    checks.check_decode(case, "xla", parts=2)


@pytest.mark.parametrize(("parts", "window"), [(1, None), (4, 70)])
@pytest.mark.parametrize(("step", "lanes", "warps"), [(16, False, 1), (32, False, 2), (32, True, 4)])
def test_every_vector_tile_equals_float64(step, lanes, warps, parts, window, monkeypatch):
    tiles = AttentionTiles(step, parts, True, lanes, warps, num_stages=1)
    monkeypatch.setattr(decode_attention, "attention_tiles", lambda *shape: tiles)
    checks.check_decode(dataclasses.replace(ONE_HEAD, window=window), "triton", parts=2)


@pytest.mark.parametrize("case", [ONE_HEAD, GROUPED], ids=lambda c: c.name)
def test_a_row_does_not_depend_on_its_neighbours(case):
    checks.check_neighbours(case, "triton")


@pytest.mark.parametrize("number", range(len(ATTENTION_CASES)), ids=[c.name for c in ATTENTION_CASES])
def test_prefill_equals_float64(number):
    """Rotation, cache and attention; one token, a continued chunk, whole blocks and short ones."""
    case, norms = ATTENTION_CASES[number], number % 2 == 0
    spans = ((0, 1), (10, 9), (3, BLOCK_TOKENS), (37, 2 * BLOCK_TOKENS + 22))
    given = attention_oracle.prefill_inputs(case, spans, 243, BLOCK_TOKENS, norms=norms, parts=2 * norms)
    checks.check_prefill(given, "triton", window=case.window, softcap=case.softcap)


@pytest.mark.parametrize("rows", [1, 8, 33, 64])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_products_equal_float64(name, rows):
    linear = LINEARS[f"llama2-7b.{name}"]
    checks.check_matmul(rows, linear.inputs, sum(linear.slices), "bfloat16", "triton")


@pytest.mark.parametrize("rows", [5, 33])
def test_float32_products_are_exact(rows):
    checks.check_matmul(rows, 4096, 192, "float32", "triton")


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, "bfloat16"), (8, "bfloat16"), (64, "bfloat16"), (16, "float16"), (33, "float32")]
)
def test_products_of_a_deferred_norm_equal_float64(rows, dtype):
    linear = LINEARS["llama2-7b.qkv"]
    checks.check_matmul(rows, linear.inputs, sum(linear.slices), dtype, "triton", blocks=64)
    checks.check_matmul(rows, 448, 192, dtype, "triton", blocks=7)


@pytest.mark.parametrize("blocks", [None, 64], ids=["array", "norm"])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, "bfloat16"), (8, "bfloat16"), (33, "bfloat16"), (64, "bfloat16"), (8, "float16")]
)
def test_gate_and_up_equal_float64(rows, dtype, blocks):
    linear = LINEARS["llama2-7b.gate_up"]
    checks.check_swiglu(rows, linear.inputs, linear.slices[0], dtype, "triton", blocks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [3, 17, 64])
def test_gate_and_up_of_odd_widths_equal_float64(rows, dtype):
    checks.check_swiglu(rows, 576, 192, dtype, "triton")
    checks.check_swiglu(rows, 448, 320, dtype, "triton", blocks=7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_the_residual_product_equals_float64(rows, dtype):
    """One, two, four and eight parts; each call takes the arrivals that the one before leaves."""
    arrivals = None
    for inputs in (2048, 8192, 192, 2048, 4096):
        arrivals = checks.check_residual(rows, inputs, 2048, dtype, "triton", arrivals)


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_the_models_residual_products_equal_float64(rows):
    arrivals = None
    for linear in (LINEARS[f"llama2-7b.{name}"] for name in ("o", "down")):
        arrivals = checks.check_residual(rows, linear.inputs, *linear.slices, "bfloat16", "triton", arrivals)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype"),
    [
        (8, (4096, 11008), 4096, "bfloat16"),
        (16, (2048, 8192), 2048, "bfloat16"),
        (8, (2048, 8192), 2048, "float32"),
    ],
)
def test_the_residual_product_does_not_depend_on_who_is_last(rows, inputs, outputs, dtype):
    """200 calls, four in a row without anything between them."""
    checks.check_repeated(rows, inputs, outputs, dtype, "triton", calls=50)


def with_adapters(name: str, rows: int, ranks: tuple[int, ...], dtype: str = "bfloat16", layers: int = 2) -> fused.Case:
    """A linear of Llama-2-7B as a step runs it, with one rank for each slot."""
    linear, few = LINEARS[f"llama2-7b.{name}"], rows <= 16
    op = {"qkv": "skinny", "gate_up": "swiglu"}.get(name, "residual" if few else "skinny")
    blocks = 64 if few and op != "residual" else None
    padded = 1 << (max(ranks) - 1).bit_length()
    return fused.Case(op, rows, linear.inputs, linear.slices, dtype, blocks, (ranks,) * len(fused.OPS), padded, layers)


EIGHT, MIXED = (16,) * 8, (16, 64, 8, 33, 1, 16, 0, 16)


@pytest.mark.parametrize("ranks", [EIGHT, MIXED], ids=["eight", "mixed"])
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_products_with_adapters_equal_float64(name, rows, ranks):
    """All slots in use; then several rows of one, and rows without."""
    case = with_adapters(name, rows, ranks)
    fused.check(fused.make(case, [t % 8 for t in range(rows)], 1), "triton")
    fused.check(fused.make(case, [(1, -1, 3, 1, 6, 2, 4, 3)[t % 8] for t in range(rows)], 0), "triton")


@pytest.mark.parametrize("name", ["qkv", "o"])
def test_float32_products_with_adapters_are_exact(name):
    case = dataclasses.replace(
        with_adapters(name, 8, MIXED, "float32"), slices=(128,) if name == "o" else (128, 64, 64)
    )
    fused.check(fused.make(case, [t - 1 for t in range(8)], 1), "triton")


@pytest.mark.parametrize(
    ("op", "rows"), [("skinny", 8), ("skinny", 64), ("residual", 8), ("swiglu", 8), ("swiglu", 64)]
)
def test_a_rows_bits_with_adapters_depend_on_itself(op, rows):
    slices = {"skinny": (1024, 256, 256), "residual": (1024,), "swiglu": (1024, 1024)}[op]
    case = fused.Case(op, rows, 2048, slices, "bfloat16")
    for slot in range(-1, 6):
        fused.check_row_bits(case, "triton", rows // 2, slot)
    ids = [t % 7 - 1 for t in range(rows)]
    fused.check_plain_rows(case, "triton", ids)
    for row, value in ((0, np.nan), (2, np.inf)):
        fused.check_broken_row(case, "triton", ids, row, value)


@pytest.mark.parametrize(("rows", "names"), [(8, ("qkv", "o", "gate_up")), (64, ("down", "gate_up"))])
def test_products_with_adapters_do_not_depend_on_who_is_first(rows, names):
    """200 calls of each, four layers without anything between them."""
    cases = [with_adapters(name, rows, MIXED, layers=4) for name in names]
    fused.check_repeated(cases, "triton", [t % 9 - 1 for t in range(rows)], calls=50)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("parts", [None, 0, 4], ids=["alone", "added", "parts"])
def test_norms_equal_float64(parts, dtype):
    for rows, size in ((8, 4096), (500, 576)):
        checks.check_norm(rows, size, dtype, parts, "triton")


def test_a_step_is_one_graph_launch():
    """Counted in a profile: a graph a step. Beside it the driver launches a kernel for each small array that the host sends
    (measured: 3 for decode, 7 for prefill, one more with adapters); with graphs off, each of the two layers takes five at least."""
    script, steps = str(ROOT / "tests" / "device" / "graph_launches.py"), 5
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, script, str(steps)], capture_output=True, text=True, timeout=280, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert {key.split("[")[0] for key in found["on"]} == {"decode", "prefill"} and found["on"].keys() == found[
        "off"
    ].keys()
    for key, counted in found["on"].items():
        assert counted["graphs"] == steps and counted["kernels"] <= 9 * steps, (key, counted)
    for key, counted in found["off"].items():
        assert counted["graphs"] == 0 and counted["on_device"] >= 10 * steps, (key, counted)


# ---- the engine ----
@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "llama-bias", "mistral-window", "qwen2", "qwen3"])
def test_a_mixed_batch_equals_transformers_and_peft(name, tmp_path):
    """The engine with its Triton kernels, float32 with exact products."""
    from lora_jax import LLM, LoRARequest, SamplingParams

    base = tiny.save_base(name, tmp_path / "base")
    everything = [*tiny.ALL_LINEAR, "lm_head", "embed_tokens"]
    adapters = {
        "a": tiny.save_adapter(base, tmp_path / "a", seed=1, r=5, target_modules=everything),
        "b": tiny.save_adapter(base, tmp_path / "b", seed=2, r=8, target_modules=["q_proj", "down_proj"]),
    }
    llm = LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=96,
        disable_tqdm=True,
        compilation_cache_dir="",
    )
    assert llm.engine._runtime.spec.setup.implementation == "triton"
    names = [None, "a", "b", "a"]
    ids = [np.random.default_rng(i).integers(3, tiny.VOCAB, 20 + i).tolist() for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=5, logprobs=5)
    loras = [n and LoRARequest(n, 1, str(adapters[n])) for n in names]
    outputs = llm.generate([{"prompt_token_ids": i} for i in ids], params, loras, use_tqdm=False)
    oracles = {n: tiny.Oracle(base, adapters[n] if n else None) for n in set(names)}
    for n, output in zip(names, outputs, strict=True):
        want = oracles[n].logprobs(output.prompt_token_ids + output.outputs[0].token_ids)
        entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        worst = max(abs(v.logprob - want[i, t]) for i, e in enumerate(entries) for t, v in (e or {}).items())
        assert worst < 1e-3, (n, worst)
    assert llm.stats()["compilations_after_warmup"] == 0


def test_idle_lora_runs_the_plain_programs(tmp_path):
    """Two fresh processes that share autotuning results, one with LoRA: equal programs, bit-equal log-probabilities."""
    base = tiny.save_base("llama", tmp_path / "base")
    script = str(ROOT / "tests" / "support" / "engine_process.py")
    found = []
    for mode in ("plain", "lora"):
        command = [sys.executable, script, str(base), mode, str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    plain, lora = found
    assert plain["hashes"] == {key: lora["hashes"][key] for key in plain["hashes"]}
    assert plain["logprobs"] == lora["logprobs"]
