"""What only an NVIDIA GPU can show. Run there: python -m pytest -m device tests/device"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lora_jax.kernels.cases import ATTENTION_CASES

from tests.support import attention_oracle, tiny

pytestmark = pytest.mark.device
ROOT = Path(__file__).resolve().parents[2]


def test_lora_kernels_equal_float64():
    script = str(ROOT / "tests" / "device" / "kernels_on_gpu.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda c: c.name)
def test_decode_attention_equals_float64(case, implementation):
    import jax
    from lora_jax.kernels.paged_attention import paged_decode_attention

    q, kv, *rest = attention_oracle.inputs(case)
    q, kv = (np.asarray(jax.numpy.asarray(x, case.dtype)) for x in (q, kv))
    options = dict(scale=case.head_dim**-0.5, window=case.window)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(lambda *a: paged_decode_attention(*a, **options, implementation=implementation))(q, kv, *rest)
    want = attention_oracle.attention(q, kv, *rest, **options)
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[case.dtype]


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
