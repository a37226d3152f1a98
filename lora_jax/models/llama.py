"""Llama, Mistral, Qwen2 and Qwen3 decoders: one module tree, told apart by `ModelConfig` alone.

Also says how Hugging Face tensors map to it (`hf_plan`) and where adapters can attach (`lora_sites`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..lora.adapter import TargetSpec
from ..lora.sites import LoRASite, target_specs
from .checkpoint import HFSource
from .config import ModelConfig
from .layers import DecoderLayer, RMSNorm, StepInputs, Stream, TiedHead, array, rope_tables
from .rope import inv_freq

Path = tuple[str | int, ...]  # of a parameter or module in the tree


class LlamaModel(nnx.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, i, dtype, rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def __call__(self, tokens: jax.Array, positions: jax.Array, kv: tuple[jax.Array, ...], inputs: StepInputs):
        """tokens, positions int32 [T]; kv: a page array a layer. Returns (hidden [T, hidden], kv)."""
        rope = rope_tables(positions, jnp.asarray(inv_freq(self.config.rope, self.config.head_dim)))
        norms = [layer.input_layernorm for layer in self.layers] + [self.norm]
        stream = Stream.start(self.embed_tokens(tokens), norms[0], self.config, inputs)
        pages = []
        for layer, following, layer_kv in zip(self.layers, norms[1:], kv, strict=True):
            stream, layer_kv = layer(stream, following, rope, layer_kv, inputs)
            pages.append(layer_kv)
        return array(stream.normed), tuple(pages)


class LlamaForCausalLM(nnx.Module):
    """`model` gives hidden states, `lm_head` logits [T, vocab] in the model's dtype."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.model = LlamaModel(config, dtype, rngs)
        if config.tie_word_embeddings:
            self.lm_head = TiedHead(self.model.embed_tokens)
        else:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
            )


def abstract_model(config: ModelConfig, dtype: jnp.dtype) -> LlamaForCausalLM:
    """The module tree with shapes instead of arrays: nothing is allocated."""
    return nnx.eval_shape(lambda: LlamaForCausalLM(config, dtype, nnx.Rngs(0)))


def hf_plan(config: ModelConfig) -> dict[Path, HFSource]:
    """Our parameter path -> the Hugging Face tensors it is made of."""
    h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    plan: dict[Path, HFSource] = {}

    def vector(path: Path, name: str, size: int) -> None:
        plan[path] = HFSource((name,), (size,))

    def linear(path: Path, base: str, names: tuple[str, ...], rows: tuple[int, ...], inputs: int, bias: bool) -> None:
        shape = (inputs, sum(rows))
        weights, biases = (tuple(f"{base}.{n}.{kind}" for n in names) for kind in ("weight", "bias"))
        plan[(*path, "kernel")] = HFSource(weights, shape, transpose=True, rows=rows)
        if bias:
            plan[(*path, "bias")] = HFSource(biases, (shape[1],), rows=rows)

    # a variable that two modules share is listed once, under the path that sorts first
    embedding = ("lm_head", "embedding") if config.tie_word_embeddings else ("model", "embed_tokens", "embedding")
    plan[embedding] = HFSource(("model.embed_tokens.weight",), (config.vocab_size, h))
    for i in range(config.num_layers):
        name, path = f"model.layers.{i}", ("model", "layers", i)
        vector((*path, "input_layernorm", "scale"), f"{name}.input_layernorm.weight", h)
        vector((*path, "post_attention_layernorm", "scale"), f"{name}.post_attention_layernorm.weight", h)
        attn = (*path, "self_attn")
        linear(
            (*attn, "qkv_proj"), f"{name}.self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv), h, config.qkv_bias
        )
        linear((*attn, "o_proj"), f"{name}.self_attn", ("o_proj",), (h,), q, config.o_bias)
        if config.qk_norm:
            for n in ("q_norm", "k_norm"):
                vector((*attn, n, "scale"), f"{name}.self_attn.{n}.weight", d)
        linear((*path, "mlp", "gate_up_proj"), f"{name}.mlp", ("gate_proj", "up_proj"), (f, f), h, config.mlp_bias)
        linear((*path, "mlp", "down_proj"), f"{name}.mlp", ("down_proj",), (h,), f, config.mlp_bias)
    vector(("model", "norm", "scale"), "model.norm.weight", h)
    if not config.tie_word_embeddings:
        plan[("lm_head", "kernel")] = HFSource(("lm_head.weight",), (h, config.vocab_size), transpose=True)
    return plan


def lora_sites(config: ModelConfig) -> list[LoRASite]:
    """Every module that can carry an adapter."""
    h, f, d, v = config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size
    q, kv = config.num_heads * d, config.num_kv_heads * d
    sites = []
    for i in range(config.num_layers):
        path, attn, mlp = ("model", "layers", i), f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv_names = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
        sites += [
            LoRASite((*path, "self_attn", "qkv_proj"), "qkv", i, h, (q, kv, kv), qkv_names),
            LoRASite((*path, "self_attn", "o_proj"), "o", i, q, (h,), (f"{attn}.o_proj",)),
            LoRASite((*path, "mlp", "gate_up_proj"), "gate_up", i, h, (f, f), (f"{mlp}.gate_proj", f"{mlp}.up_proj")),
            LoRASite((*path, "mlp", "down_proj"), "down", i, f, (h,), (f"{mlp}.down_proj",)),
        ]
    sites.append(LoRASite(("model", "embed_tokens"), "embed", 0, v, (h,), ("model.embed_tokens",), kind="embedding"))
    sites.append(LoRASite(("lm_head",), "lm_head", 0, h, (v,), ("lm_head",), head=True))
    return sites


def lora_targets(config: ModelConfig) -> dict[str, TargetSpec]:
    """Hugging Face module name -> where an adapter's tensors for it go."""
    return target_specs(lora_sites(config))
