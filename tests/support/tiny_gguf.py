"""A tiny Llama GGUF file, and the weights it stands for."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ he", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, from its definition."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(hidden))]


TOKENS = SPECIAL + byte_alphabet() + [m.replace(" ", "") for m in MERGES]


def hf_weights() -> dict[str, np.ndarray]:
    """Float32 weights as Hugging Face names and lays them out."""
    rng = np.random.default_rng(7)
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm": (HIDDEN,), at + "post_attention_layernorm": (HIDDEN,)}
        shapes |= {at + "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), at + "self_attn.o_proj": (HIDDEN, HIDDEN)}
        shapes |= {at + f"self_attn.{x}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for x in "kv"}
        shapes |= {at + "mlp.gate_proj": (MLP, HIDDEN), at + "mlp.up_proj": (MLP, HIDDEN)}
        shapes |= {at + "mlp.down_proj": (HIDDEN, MLP)}
    return {f"{k}.weight": rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if m := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
        return f"blk.{m[1]}.{GGUF_NAMES[m[2]]}.weight"
    return f"{GGUF_NAMES[name]}.weight"


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to q and k: row i of a head's first half, then row i of its second half."""
    out = np.empty_like(w)
    d = w.shape[0] // heads
    for h in range(heads):
        for i in range(d // 2):
            out[h * d + 2 * i] = w[h * d + i]
            out[h * d + 2 * i + 1] = w[h * d + d // 2 + i]
    return out


def dequantized(blocks: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Q8_0 (scale, 32 int8) and Q4_1 (scale, minimum, 32 nibbles: low halves first), read byte by byte."""
    values = []
    for block in blocks.reshape(-1, 34 if kind == "Q8_0" else 20):
        scale = np.float32(block[:2].view(np.float16)[0])
        if kind == "Q8_0":
            values.append(block[2:].view(np.int8).astype(np.float32) * scale)
        else:
            low = np.float32(block[2:4].view(np.float16)[0])
            nibbles = np.concatenate([block[4:] & 15, block[4:] >> 4]).astype(np.float32)
            values.append(nibbles * scale + low)
    return np.concatenate(values).reshape(shape)


def write_gguf(path: Path, extra: dict[str, np.ndarray] | None = None, **fields: str) -> dict[str, np.ndarray]:
    """A tiny Llama GGUF; returns the float32 values that the quantised file stands for, in Hugging Face's layout."""
    w = gguf.GGUFWriter(str(path), fields.get("arch", "llama"))
    w.add_block_count(LAYERS)
    w.add_context_length(128)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(MLP)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_freq_base(100000.0)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model(fields.get("model", "gpt2"))
    w.add_tokenizer_pre(fields.get("pre", "smollm"))
    w.add_token_list(TOKENS)
    w.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    w.add_token_merges(MERGES)
    w.add_unk_token_id(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(2)
    w.add_chat_template(TEMPLATE)
    meant = {}
    for name, value in {**hf_weights(), **(extra or {})}.items():
        kind = "F32" if value.ndim == 1 else "Q8_0" if "embed" in name else "Q4_1"
        heads = {"q": HEADS, "k": KV_HEADS}.get(name.split(".")[-2][0] if "self_attn" in name else "")
        stored = interleave(value, heads) if heads else value
        gguf_key = name if name in (extra or {}) else gguf_name(name)
        if kind == "F32":
            w.add_tensor(gguf_key, stored)
            meant[name] = value
            continue
        quant = getattr(gguf.GGMLQuantizationType, kind)
        blocks = gguf.quants.quantize(stored, quant)
        w.add_tensor(gguf_key, blocks, raw_dtype=quant)
        back = dequantized(blocks, kind, stored.shape)
        order = np.argsort(interleave(np.arange(len(back))[:, None], heads)[:, 0]) if heads else slice(None)
        meant[name] = back[order]
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return meant
