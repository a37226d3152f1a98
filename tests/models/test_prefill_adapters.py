"""Prefill with adapters through the engine, in its Triton form: prefill programs with adapters hold the kernels themselves,
interpreted. Against the engine in plain JAX, and against transformers and PEFT."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from lora_jax import LLM, LoRARequest, SamplingParams, kv_cache
from lora_jax.models import layers
from lora_jax.step import lora_steps
from tests.support import tiny

ADAPTERS = {  # ranks that are no multiples of 16, one of them larger; one adapter without most modules
    "all": dict(r=5),
    "qv": dict(r=24, target_modules=["q_proj", "v_proj"]),
    "mlp": dict(r=17, target_modules=["gate_proj", "down_proj", "o_proj"]),
}
LONG = [
    (37, "all"),
    (21, None),
    (1, "qv"),
    (30, "all"),
    (11, "mlp"),
    (9, "qv"),
]  # 109 tokens: tiles of rows, no prompt fills one
SHORT = [(13, "qv"), (2, None), (9, "all"), (1, "mlp"), (5, "all")]  # 30 tokens: as a decode step
BASES = {  # heads that one kernel rotates, with norms; heads too small for it, where a tile of columns lies in one slice
    "qwen3": {},
    "llama": dict(num_key_value_heads=4, intermediate_size=128),
}
OPS = ("add_rms_norm", "skinny_matmul", "skinny_lora_matmul", "lora_swiglu", "residual_matmul")
TILED_OPS = ("lora_shrink_tiles", "lora_add", "lora_silu_mul")


@pytest.fixture(scope="module", params=BASES)
def engine(request, tmp_path_factory):
    """(engine, adapters' folders, float32 oracles)."""
    folder = tmp_path_factory.mktemp(request.param)
    base = tiny.save_base(request.param, folder / "base", **BASES[request.param])
    paths = {n: tiny.save_adapter(base, folder / n, seed=i, **how) for i, (n, how) in enumerate(ADAPTERS.items())}
    llm = LLM(
        str(base),
        enable_lora=True,
        max_loras=4,
        max_lora_rank=24,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=64,
        disable_tqdm=True,
        compilation_cache_dir="",
    )
    return llm, paths, {name: tiny.Oracle(base, paths.get(name)) for name in (None, *paths)}


@pytest.fixture
def interpreted(engine, monkeypatch) -> list[str]:
    """Names of the ops that prefill programs with adapters call from now on."""
    runtime, names = engine[0].engine._runtime, []

    def count(op, **options):
        @functools.wraps(op)
        def call(*args, **given):
            names.append(op.__name__)
            return op(*args, **{**given, **options})

        return call

    for module, ops in ((layers, OPS + TILED_OPS), (kv_cache, ("rope_to_cache", "lora_rope_to_cache"))):
        for name in ops:
            monkeypatch.setattr(module, name, count(getattr(module, name), interpret=True))
    attend = count(kv_cache.prefill_attention, implementation="xla")
    monkeypatch.setattr(kv_cache, "prefill_attention", attend)
    prefill = jax.jit(lora_steps(runtime.spec.lora.definition, 5, "triton")["prefill"])
    call = runtime._call
    chosen = lambda key: prefill if key.phase == "prefill" and key.lora else functools.partial(call, key)  # noqa: E731
    monkeypatch.setattr(runtime, "_call", lambda key, *args: chosen(key)(*args))
    return names


def logprobs(engine, prompts) -> list[np.ndarray]:
    """Of each prompt's tokens but the first, and of the token after it: 5 or 6 a place, as {token: log-probability}."""
    llm, paths, _ = engine
    ids = [np.random.default_rng(i).integers(3, tiny.VOCAB, length).tolist() for i, (length, _) in enumerate(prompts)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=5, logprobs=5)
    loras = [name and LoRARequest(name, 1, str(paths[name])) for _, name in prompts]
    outputs = llm.generate([{"prompt_token_ids": i} for i in ids], params, loras, use_tqdm=False)
    return [
        (i, [{t: v.logprob for t, v in e.items()} for e in [*o.prompt_logprobs[1:], *o.outputs[0].logprobs]])
        for i, o in zip(ids, outputs, strict=True)
    ]


@pytest.mark.parametrize("prompts", [LONG, SHORT], ids=["tiles", "few-rows"])
def test_the_kernels_in_the_engine(engine, prompts, request):
    plain = logprobs(engine, prompts)
    names = request.getfixturevalue("interpreted")
    got = logprobs(engine, prompts)
    assert ("lora_shrink_tiles" in names) == (prompts is LONG)
    if prompts is LONG:
        expected = dict.fromkeys(("lora_shrink_tiles", "lora_add", "lora_silu_mul", "lora_rope_to_cache"), 2)
        expected |= {"lora_shrink_tiles": 8, "lora_add": 4}
        assert {name: names.count(name) for name in expected} == expected
    for (_, name), (ids, found), (_, before) in zip(prompts, got, plain, strict=True):
        want = engine[2][name].logprobs(ids)
        for place, (entry, other) in enumerate(zip(found, before, strict=True)):
            for token, value in entry.items():
                assert abs(value - want[place, token]) < 2e-4, (name, place)
            assert entry.keys() == other.keys() and all(abs(entry[t] - other[t]) < 1e-4 for t in entry), (name, place)


def test_the_oracle_tells_adapters_apart(engine):
    ids = list(range(5, 15))
    each = [oracle.logprobs(ids) for oracle in engine[2].values()]
    gaps = [np.abs(a - b).max(-1).min() for i, a in enumerate(each) for b in each[:i]]
    assert min(gaps) > 0.01, "a wrong adapter would pass"
