"""config.json, generation_config.json and model names, against transformers' own classes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lora_jax.errors import ModelLoadError
from lora_jax.models.config import load_config, parse_config
from lora_jax.models.generation import load_generation_defaults, parse_generation_defaults
from lora_jax.models.rope import RopeConfig, inv_freq
from lora_jax.models.shapes import SHAPES, known_shape
from lora_jax.request import SamplingParams

MODEL_TYPES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def fields(family: str, **more) -> dict:
    sizes = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": MODEL_TYPES[family],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {k: v for k, v in {**sizes, **more}.items() if v is not ...}


VARIANTS = [
    fields("Llama"),
    fields("Llama", num_key_value_heads=...),
    fields("Llama", num_key_value_heads=None, head_dim=None),
    fields("Llama", head_dim=32, rms_norm_eps=1e-5, max_position_embeddings=77, tie_word_embeddings=True),
    fields("Llama", attention_bias=True),
    fields("Llama", mlp_bias=True, torch_dtype="bfloat16"),
    fields("Llama", rope_theta=5e5, dtype="float16", torch_dtype="bfloat16"),
    fields("Llama", rope_theta=123456, rope_scaling=None),
    fields("Llama", rope_scaling={"type": "linear", "factor": 4}),
    fields("Llama", rope_theta=5e4, rope_scaling={"rope_type": "linear", "type": "linear", "factor": 2.5}),
    fields("Llama", rope_theta=5e5, rope_scaling=LLAMA3),
    fields("Llama", rope_parameters={**LLAMA3, "rope_theta": 3e5}),
    fields("Llama", rope_theta=7.0, rope_parameters={"rope_type": "default", "rope_theta": 2e4}),
    fields("Llama", rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 2e4}),
    fields("Llama", max_position_embeddings=128, rope_scaling={k: v for k, v in LLAMA3.items() if "orig" not in k}),
    fields("Llama", original_max_position_embeddings=64, rope_scaling=LLAMA3),
    fields("Llama", pretraining_tp=1, attention_dropout=0.1, use_cache=False, foo="bar", sliding_window=None),
    fields("Mistral"),
    fields("Mistral", num_key_value_heads=4, sliding_window=None, head_dim=None),
    fields("Mistral", sliding_window=8, head_dim=24, dtype="torch.bfloat16"),
    fields("Mistral", attention_bias=True, mlp_bias=True),
    fields("Qwen2"),
    fields("Qwen2", num_key_value_heads=..., num_attention_heads=32),
    fields("Qwen2", sliding_window=16, use_sliding_window=False, max_window_layers=1),
    fields("Qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=3),
    fields("Qwen2", use_sliding_window=True, max_window_layers=0),
    fields("Qwen2", use_sliding_window=True, max_window_layers=4),
    fields("Qwen2", use_sliding_window=True, sliding_window=None, max_window_layers=0),
    fields("Qwen2", use_sliding_window=True, layer_types=["full_attention", "sliding_attention"] * 2),
    fields("Qwen2", attention_bias=False, head_dim=20),
    fields("Qwen3"),
    fields("Qwen3", head_dim=16, attention_bias=True, rope_theta=1e6),
    fields("Qwen3", sliding_window=5, use_sliding_window=True, max_window_layers=2, rms_norm_eps=1e-5),
    fields("Qwen3", layer_types=["full_attention"] * 4),
]


def hf_model(raw: dict, folder):
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in ("dtype", "torch_dtype")}))
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("raw", VARIANTS, ids=[f"{v['model_type']}-{i}" for i, v in enumerate(VARIANTS)])
def test_equals_what_transformers_builds(raw, tmp_path):
    model = hf_model(raw, tmp_path)
    ours = parse_config(raw, "here")
    layer, attn, config = model.model.layers[0], model.model.layers[0].self_attn, model.config
    assert ours.architecture == type(model).__name__
    assert (ours.vocab_size, ours.hidden_size) == tuple(model.model.embed_tokens.weight.shape)
    assert ours.intermediate_size == layer.mlp.up_proj.out_features
    assert ours.num_layers == len(model.model.layers)
    assert ours.head_dim == attn.head_dim
    assert ours.num_heads * ours.head_dim == attn.q_proj.out_features
    assert ours.num_kv_heads * ours.head_dim == attn.k_proj.out_features
    assert ours.rms_norm_eps == layer.input_layernorm.variance_epsilon
    assert ours.max_position_embeddings == config.max_position_embeddings
    assert ours.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert ours.qkv_bias == (attn.q_proj.bias is not None) == (attn.v_proj.bias is not None)
    assert ours.o_bias == (attn.o_proj.bias is not None)
    assert ours.mlp_bias == (layer.mlp.down_proj.bias is not None) == (layer.mlp.gate_proj.bias is not None)
    assert ours.qk_norm == hasattr(attn, "q_norm")
    if ours.architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        windows = [getattr(config, "sliding_window", None)] * ours.num_layers
    else:
        windows = [block.self_attn.sliding_window for block in model.model.layers]
    assert list(ours.layer_windows) == windows
    np.testing.assert_allclose(inv_freq(ours.rope, ours.head_dim), model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert model.model.rotary_emb.attention_scaling == 1.0
    assert hash(ours) == hash(parse_config(dict(raw), "there"))


def test_dtype_as_transformers_reads_it():
    for more, expected in [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float32"}, "float32"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float64"}, "float32"),
        ({"dtype": "auto"}, None),
        ({}, None),
    ]:
        assert parse_config(fields("Llama", **more), "x").dtype == expected


def test_what_transformers_writes_is_read_back(tmp_path):
    """Both generations of file: rope_parameters as written today, rope_theta and rope_scaling as written before."""
    for family, more in [
        ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Mistral", {}),
    ]:
        raw = fields(family, torch_dtype="float32", **more)
        model = hf_model(raw, tmp_path)
        model.save_pretrained(tmp_path / family)
        saved, written = load_config(tmp_path / family)
        assert "rope_parameters" in written
        assert saved == parse_config(raw, "x")


@pytest.mark.parametrize("head_dim", [16, 96, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_inv_freq_equals_transformers_functions(kind, theta, head_dim):
    section = {
        "linear": {"rope_type": "linear", "factor": 3.0},
        "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    }
    raw = fields(
        "Llama", head_dim=head_dim, max_position_embeddings=131072, rope_theta=theta, rope_scaling=section[kind]
    )
    ours = parse_config(raw, "x")
    assert ours.rope.kind == kind
    config = AutoConfig.for_model("llama", **{k: v for k, v in raw.items() if k != "model_type"})
    expected, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    freq = inv_freq(ours.rope, head_dim)
    assert freq.dtype == np.float32 and freq.shape == (head_dim // 2,) and scale == 1.0
    np.testing.assert_allclose(freq, expected, rtol=1e-6, atol=0)
    plain = inv_freq(RopeConfig(theta=theta), head_dim)
    assert np.abs(freq / plain - 1).max() > 0.5  # the tolerance would notice a rope type that is ignored


REFUSED = [
    (fields("Llama", architectures=["Gemma2ForCausalLM"]), ["Gemma2ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
    (fields("Llama", architectures=["LlamaForSequenceClassification"]), ["LlamaForSequenceClassification"]),
    (fields("Llama", architectures=["LlamaForCausalLM", "MistralForCausalLM"]), ["architectures", "exactly one"]),
    (fields("Llama", architectures=...), ["architectures", "None"]),
    (fields("Llama", architectures="LlamaForCausalLM"), ["architectures"]),
    (fields("Llama", architectures=[["LlamaForCausalLM"]]), ["architectures"]),
    (fields("Llama", model_type="mistral"), ["model_type", "mistral", "llama"]),
    *((fields("Qwen2", **{name: ...}), [name, "missing"]) for name in
      ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
    (fields("Llama", hidden_size=64.0), ["hidden_size", "64.0"]),
    (fields("Llama", hidden_size="64"), ["hidden_size", "'64'"]),
    (fields("Llama", vocab_size=True), ["vocab_size", "True"]),
    (fields("Llama", num_hidden_layers=0), ["num_hidden_layers", "0"]),
    (fields("Llama", num_hidden_layers=None), ["num_hidden_layers", "None"]),
    (fields("Llama", num_key_value_heads=3), ["num_attention_heads", "num_key_value_heads = 3"]),
    (fields("Llama", hidden_size=66), ["hidden_size", "66", "head_dim"]),
    (fields("Llama", head_dim=15), ["head_dim", "15", "even"]),
    (fields("Qwen3", head_dim=None), ["head_dim"]),
    (fields("Llama", rms_norm_eps=0), ["rms_norm_eps"]),
    (fields("Llama", rms_norm_eps=float("nan")), ["rms_norm_eps"]),
    (fields("Llama", rms_norm_eps="1e-6"), ["rms_norm_eps", "1e-6"]),
    (fields("Llama", tie_word_embeddings="yes"), ["tie_word_embeddings", "yes"]),
    (fields("Llama", attention_bias=1), ["attention_bias"]),
    (fields("Llama", hidden_act="gelu"), ["hidden_act", "gelu"]),
    (fields("Llama", quantization_config={"quant_method": "gptq", "bits": 4}), ["quantization_config", "gptq"]),
    (fields("Llama", pretraining_tp=2), ["pretraining_tp", "2"]),
    (fields("Llama", partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
    (fields("Llama", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}), ["partial_rotary_factor"]),
    *((fields("Llama", rope_scaling={"rope_type": t, "factor": 2.0}), ["rope_scaling", t]) for t in
      ("dynamic", "yarn", "longrope", "su", "mrope")),
    (fields("Llama", rope_scaling={"type": "yarn", "factor": 2.0}), ["rope_scaling", "yarn"]),
    (fields("Llama", rope_parameters={"rope_type": "yarn", "factor": 2.0}), ["rope_parameters", "yarn"]),
    (fields("Llama", rope_scaling={"factor": 2.0}), ["rope_scaling", "factor", "2.0"]),
    (fields("Llama", rope_scaling={"type": "linear"}), ["rope_scaling", "factor", "missing"]),
    (fields("Llama", rope_scaling={"type": "linear", "factor": -1}), ["factor", "-1"]),
    (fields("Llama", rope_scaling={"type": "linear", "factor": 2, "mscale": 3}), ["mscale", "3"]),
    (fields("Llama", rope_scaling={**LLAMA3, "high_freq_factor": 1.0}), ["high_freq_factor"]),
    (fields("Llama", rope_scaling={**LLAMA3, "low_freq_factor": "x"}), ["low_freq_factor"]),
    (fields("Llama", rope_scaling="linear"), ["rope_scaling", "linear"]),
    (fields("Llama", rope_scaling=LLAMA3, rope_parameters={"rope_type": "default"}), ["rope_scaling", "disagree"]),
    (fields("Llama", rope_theta="1e4"), ["rope_theta"]),
    (fields("Qwen3", rope_parameters={"full_attention": {"rope_theta": 1e4}}), ["rope_parameters.full_attention"]),
    (fields("Llama", sliding_window=8), ["sliding_window", "8"]),
    (fields("Llama", layer_types=["sliding_attention"] * 4), ["layer_types"]),
    (fields("Mistral", sliding_window=0), ["sliding_window", "0"]),
    (fields("Mistral", layer_types=["full_attention"] * 4), ["layer_types", "sliding_window = 4096"]),
    (fields("Qwen2", layer_types=["full_attention"] * 3), ["layer_types", "4 layers"]),
    (fields("Qwen2", layer_types=["sliding_attention"] * 4), ["layer_types", "use_sliding_window"]),
    (fields("Qwen2", layer_types=["chunked_attention"] * 4), ["layer_types", "chunked_attention"]),
    (fields("Qwen2", use_sliding_window=1), ["use_sliding_window"]),
    (fields("Qwen2", use_sliding_window=True, max_window_layers=-1), ["max_window_layers"]),
    (fields("Llama", dtype="float8_e4m3fn"), ["dtype", "float8_e4m3fn"]),
    (fields("Llama", is_encoder_decoder=True), ["is_encoder_decoder"]),
    (fields("Llama", is_causal=False), ["is_causal"]),
    (fields("Llama", attention_multiplier=1.0), ["attention_multiplier"]),
    (fields("Llama", logits_scaling=8.0), ["logits_scaling", "8.0"]),
    (fields("Llama", final_logit_softcapping=30.0), ["final_logit_softcapping"]),
    (fields("Llama", use_qk_norm=True), ["use_qk_norm"]),
    (fields("Llama", per_layer_config={"0": {"hidden_size": 32}}), ["per_layer_config"]),
    (fields("Qwen2", text_config={}), ["text_config"]),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "words"), REFUSED, ids=[" ".join(w) for _, w in REFUSED])
def test_refuses_naming_source_field_and_value(raw, words):
    with pytest.raises(ModelLoadError) as e:
        parse_config(raw, "dir/config.json")
    for word in ["dir/config.json", *words]:
        assert word in str(e.value)


def test_neutral_values_and_null_are_accepted():
    neutral = {
        "is_causal": True,
        "logits_scaling": 1.0,
        "pruned_heads": {},
        "quantization_config": None,
        "use_mrope": False,
    }
    plain = parse_config(fields("Llama"), "x")
    assert parse_config(fields("Llama", **neutral, hidden_act="swish", final_logit_softcapping=None), "x") == plain
    assert parse_config(fields("Qwen3", use_qk_norm=True), "x") == parse_config(fields("Qwen3"), "x")


@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff\xfe"])
def test_broken_json_names_the_file(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path)


def test_known_shapes():
    llama = known_shape("llama-2-7b")
    assert (llama.hidden_size, llama.num_layers, llama.intermediate_size, llama.dtype) == (4096, 32, 11008, "bfloat16")
    assert {known_shape(name).architecture for name in SHAPES} == {f"{f}ForCausalLM" for f in MODEL_TYPES}
    with pytest.raises(ModelLoadError, match=r"'gpt2'.*llama-2-7b"):
        known_shape("gpt2")


# generation_config.json


def test_generation_defaults_take_what_the_file_sets(tmp_path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 7], "bos_token_id": 1, "do_sample": False, "temperature": 0.6, "top_k": 20,
                    "top_p": None, "repetition_penalty": 1.1, "max_new_tokens": 99, "num_beams": 1})
    )  # fmt: skip
    got = load_generation_defaults(tmp_path, {"eos_token_id": 9})
    assert (got.eos_token_ids, got.bos_token_id, got.do_sample) == (frozenset({5, 7}), 1, False)
    overrides = got.as_sampling_overrides()
    assert overrides == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 99}
    assert SamplingParams(**overrides).max_tokens == 99


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ({"eos_token_id": 3}, {"eos_token_id": 4}, {3}),
    ({}, {"eos_token_id": 4}, {4}),
    ({"eos_token_id": None}, {"eos_token_id": [4, 5]}, {4, 5}),
    ({"eos_token_id": []}, {"eos_token_id": 0}, {0}),
    ({}, {"eos_token_id": -1}, set()),
    ({}, {}, set()),
])  # fmt: skip
def test_end_tokens_fall_back_on_config(generation, config, expected):
    got = parse_generation_defaults(generation, config, "x")
    assert got.eos_token_ids == frozenset(expected)
    assert got.as_sampling_overrides() == {}


def test_no_generation_config_file(tmp_path):
    assert load_generation_defaults(tmp_path, {"bos_token_id": 0}).bos_token_id == 0


@pytest.mark.parametrize("bad", [
    {"eos_token_id": "2"}, {"eos_token_id": [2, True]}, {"bos_token_id": 1.0}, {"temperature": "hot"}, {"top_p": 1.5},
    {"top_k": 2.5}, {"max_new_tokens": 0}, {"repetition_penalty": 0}, {"do_sample": "yes"},
])  # fmt: skip
def test_bad_generation_values_name_file_and_field(bad):
    with pytest.raises(ModelLoadError) as e:
        parse_generation_defaults(bad, {}, "generation_config.json")
    name = next(iter(bad))
    assert "generation_config.json" in str(e.value) and name.replace("max_new_tokens", "max_tokens") in str(e.value)


def test_host_only():
    modules = ", ".join(
        f"lora_jax.models.{m}" for m in ("config", "shapes", "rope", "generation", "resolve", "safetensors_file")
    )
    code = f"import {modules}, sys; sys.exit(any(m in sys.modules for m in ('jax', 'torch', 'transformers', 'huggingface_hub')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
