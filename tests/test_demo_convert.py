"""Conversion of a tiny GGUF file against the weights, names and settings it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_jax.demo.gguf_convert import convert
from lora_jax.errors import ModelLoadError
from tests.support.tiny_gguf import HEAD_DIM, HIDDEN, TOKENS, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="module")
def converted(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted")
    convert(tiny[0], out)
    return out


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, on the bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_weights_are_the_dequantised_ones_in_hf_layout(tiny, converted):
    got = load_file(converted / "model.safetensors")
    assert set(got) == set(tiny[1])
    for name, want in tiny[1].items():
        assert got[name].dtype.name == "bfloat16" and got[name].shape == want.shape, name
        np.testing.assert_array_equal(got[name].view(np.uint16), bf16_bits(want), err_msg=name)


def test_transformers_reads_the_folder_as_meant(tiny, converted):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(converted)
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config.rms_norm_eps, config.head_dim, config.tie_word_embeddings) == (1e-5, HEAD_DIM, True)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.dtype == torch.bfloat16
    assert not hasattr(config, "quantization_config")
    model = AutoModelForCausalLM.from_pretrained(converted)
    q = model.state_dict()["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_allclose(q.float().numpy(), tiny[1]["model.layers.1.self_attn.q_proj.weight"], rtol=1e-2, atol=0)
    tok = AutoTokenizer.from_pretrained(converted)
    assert tok.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"
    assert (tok.eos_token, tok.pad_token, tok.bos_token) == ("<|im_end|>", "<|im_end|>", "<|im_start|>")


def test_tokenizer_splits_digits_and_merges(converted):
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tok.encode("hell he").tokens == ["hell", "Ġhe"]
    assert tok.encode("12").tokens == ["1", "2"], "a merge must not join digits"
    assert tok.encode("a<|im_end|>b").ids == [TOKENS.index("a"), 2, TOKENS.index("b")]
    for text in ("it's  café 你好\n\t3.14", " x"):
        assert tok.decode(tok.encode(text).ids) == text


def test_an_untied_output_becomes_lm_head(tmp_path):
    head = np.random.default_rng(1).standard_normal((len(TOKENS), HIDDEN)).astype(np.float32)
    write_gguf(tmp_path / "x.gguf", {"output.weight": head})
    (tmp_path / "out").mkdir()
    convert(tmp_path / "x.gguf", tmp_path / "out")
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"arch": "gemma"}, "gemma"), ({"model": "llama"}, "tokenizer.ggml.model"), ({"pre": "qwen2"}, "qwen2")],
)
def test_other_files_are_refused_by_name(tmp_path, fields, named):
    write_gguf(tmp_path / "x.gguf", **fields)
    with pytest.raises(ModelLoadError, match=named):
        convert(tmp_path / "x.gguf", tmp_path)


def test_unknown_tensor_and_broken_file_are_refused(tmp_path, tiny):
    write_gguf(tmp_path / "x.gguf", {"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match="attn_sinks"):
        convert(tmp_path / "x.gguf", tmp_path)
    (tmp_path / "cut.gguf").write_bytes(tiny[0].read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match="cut.gguf cannot be read"):
        convert(tmp_path / "cut.gguf", tmp_path)
