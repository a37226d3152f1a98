"""GGUF file -> Hugging Face checkpoint folder, with numpy alone (no torch). Llama architecture, byte-level BPE.

Files written: model.safetensors (bfloat16), config.json, generation_config.json, tokenizer.json, tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelLoadError

LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # llama.cpp's token types; every other type is an ordinary token


@dataclass(frozen=True)
class Gguf:
    """An open GGUF file: `fields` by key, `tensors` as the gguf package gives them (data memory-mapped)."""

    path: Path
    fields: dict[str, Any]
    tensors: list[Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value. Raises ModelLoadError when it is absent and no default is given."""
        if key in self.fields:
            return self.fields[key].contents()
        if default is None:
            raise ModelLoadError(f"{self.path.name} has no field {key!r}: not a complete Llama GGUF, take another file")
        return default


def open_gguf(path: Path) -> Gguf:
    """Raises ModelLoadError for a file that isn't GGUF, or holds an architecture or tokenizer not handled here."""
    try:
        from gguf import GGUFReader
    except ImportError as e:
        raise ModelLoadError(
            f"reading {path.name} needs the gguf package: install the extra 'demo', in a checkout pip install -e '.[demo]' ({e})"
        ) from e
    try:
        reader = GGUFReader(str(path))
    except Exception as e:  # it has no error class of its own: ValueError, IndexError ...
        raise ModelLoadError(f"{path} cannot be read as GGUF ({type(e).__name__}: {e}): fetch it again") from e
    out = Gguf(path, dict(reader.fields), list(reader.tensors))
    for key, known in {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }.items():
        if (value := out.get(key)) != known:
            raise ModelLoadError(f"{path.name}: {key} is {value!r}, and only {known!r} can be converted")
    return out


# ---------------------------------------------------------------------------------------------------------- weights
def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor. Raises ModelLoadError for one that a Llama model does not have."""
    match name.split("."):
        case ["blk", layer, kind, "weight"] if layer.isdigit() and kind in LINEARS:
            return f"model.layers.{layer}.{LINEARS[kind]}.weight"
        case [kind, "weight"] if kind in OUTSIDE:
            return f"{OUTSIDE[kind]}.weight"
    raise ModelLoadError(f"tensor {name!r} of the GGUF file has no place in a Llama checkpoint")


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * d, in] with each head's rotary pairs side by side (llama.cpp) -> first halves, then second halves."""
    out_features, in_features = weight.shape
    pairs = weight.reshape(heads, out_features // heads // 2, 2, in_features)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(weight.shape)


def tensor_values(tensor: Any, rotary_heads: dict[str, int]) -> np.ndarray:
    """One tensor, dequantised to float32, rounded to bfloat16, in Hugging Face's layout ([out, in])."""
    import ml_dtypes
    from gguf.quants import dequantize

    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    kind = tensor.name.split(".")[-2]
    if kind in rotary_heads:
        values = unpermute(values, rotary_heads[kind])
    return values.astype(ml_dtypes.bfloat16)


def write_weights(gguf: Gguf, path: Path, track: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> None:
    """Write a bfloat16 safetensors file one tensor at a time. `track` wraps the tensors (a progress bar)."""
    tensors = sorted(gguf.tensors, key=lambda t: hf_name(t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this entry
    end = 0
    for t in tensors:
        shape = [int(n) for n in reversed(t.shape)]  # GGUF lists the fastest axis first
        start, end = end, end + 2 * int(np.prod(shape))
        header[hf_name(t.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    heads = int(gguf.get("llama.attention.head_count"))
    rotary_heads = {"attn_q": heads, "attn_k": int(gguf.get("llama.attention.head_count_kv", heads))}
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in track(tensors):
            f.write(tensor_values(t, rotary_heads).tobytes())
        if f.tell() != 8 + len(text) + end:
            raise ModelLoadError(f"{gguf.path.name}: the tensors do not have the sizes that the file's index promises")


# ------------------------------------------------------------------------------------------------- config, tokenizer
def model_config(gguf: Gguf) -> dict[str, Any]:
    """config.json, in the spelling that every transformers version reads."""
    hidden, heads = int(gguf.get("llama.embedding_length")), int(gguf.get("llama.attention.head_count"))
    eps = np.float32(gguf.get("llama.attention.layer_norm_rms_epsilon"))
    eos = int(gguf.get("tokenizer.ggml.eos_token_id"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(gguf.get("tokenizer.ggml.bos_token_id")),
        "eos_token_id": eos,
        "head_dim": int(gguf.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(gguf.get("llama.feed_forward_length")),
        "max_position_embeddings": int(gguf.get("llama.context_length")),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(gguf.get("llama.block_count")),
        "num_key_value_heads": int(gguf.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": int(gguf.get("tokenizer.ggml.padding_token_id", eos)),
        "rms_norm_eps": float(str(eps)),  # the file holds float32: its shortest decimal is what was meant
        "rope_theta": float(np.float32(gguf.get("llama.rope.freq_base", 10000.0))),
        "rope_scaling": None,
        "tie_word_embeddings": not any(t.name == "output.weight" for t in gguf.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens")),
    }


def build_tokenizer(gguf: Gguf) -> Any:
    """A `tokenizers.Tokenizer`: byte-level BPE in which every digit stands alone, special tokens from the file."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens = gguf.get("tokenizer.ggml.tokens")
    merges = [(left, right) for left, right in (m.split(" ") for m in gguf.get("tokenizer.ggml.merges"))]
    tok = Tokenizer(
        BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    for text, kind in zip(tokens, gguf.get("tokenizer.ggml.token_type"), strict=True):
        if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN):
            special = kind == CONTROL_TOKEN
            added = AddedToken(text, special=special, normalized=False)
            (tok.add_special_tokens if special else tok.add_tokens)([added])
    return tok


def tokenizer_config(gguf: Gguf) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, and the chat template."""
    tokens = gguf.get("tokenizer.ggml.tokens")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    fields = {role: f"tokenizer.ggml.{name}_token_id" for role, name in roles.items()}
    named = {f"{role}_token": tokens[int(gguf.get(key))] for role, key in fields.items() if key in gguf.fields}
    return {
        **named,
        "add_prefix_space": False,
        "chat_template": gguf.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(gguf.get("llama.context_length")),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def convert(source: Path, out: Path, track: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> None:
    """Write the checkpoint of the GGUF file `source` into the existing folder `out`. Raises ModelLoadError."""
    gguf = open_gguf(source)
    config = model_config(gguf)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config(gguf),
    }.items():
        (out / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    build_tokenizer(gguf).save(str(out / "tokenizer.json"), pretty=True)
    write_weights(gguf, out / "model.safetensors", track)
