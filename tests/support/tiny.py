"""Tiny checkpoints and PEFT adapters made on the spot, and what transformers + PEFT say about them: the oracle."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import peft
import torch
import transformers

VOCAB = 264
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_ROPE_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(tie_word_embeddings=False)),
    "llama-tied-mha": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=4, rope_parameters=_ROPE_LLAMA3)),
    "llama-bias": ("Llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
    "mistral-window": ("Mistral", dict(sliding_window=8, head_dim=24)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32, tie_word_embeddings=True)),
}


F = TypeVar("F", bound=Callable)


def quiet(f: F) -> F:
    """The reference libraries' own warnings are not ours to fix."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f(*args, **kwargs)

    return call  # type: ignore[return-value]


@quiet
def save_base(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """One of ARCHITECTURES with random weights, biases and norms, as an ordinary checkpoint. changes: of its configuration."""
    family, options = ARCHITECTURES[name]
    options = {**options, **changes}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            scale = 1.0 if "norm" in key else 0.0
            p.copy_(scale + torch.randn_like(p) * (0.15 if p.ndim > 1 else 0.1))
    model.save_pretrained(folder)
    return folder


@quiet
def save_adapter(base: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """A PEFT adapter with random A and B (PEFT's own B is zero)."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = dict(r=4, lora_alpha=8, target_modules=ALL_LINEAR, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{**options, **config}))
    with torch.no_grad():
        for key, p in wrapped.named_parameters():
            if "lora_" in key:
                p.copy_(torch.randn_like(p) * 0.2)
    wrapped.save_pretrained(folder)
    return folder


class Oracle:
    """transformers, with PEFT where an adapter is named, in float32."""

    @quiet
    def __init__(self, base: Path, adapter: Path | None = None):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = (peft.PeftModel.from_pretrained(model, adapter) if adapter else model).eval()

    @quiet
    def logits(self, ids: list[int]) -> np.ndarray:
        """[len(ids), vocab] float64."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().numpy()

    def logprobs(self, ids: list[int]) -> np.ndarray:
        x = self.logits(ids)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    def greedy(self, ids: list[int], n: int) -> tuple[list[int], float]:
        """(n tokens, the smallest gap between the two largest logits on the way)."""
        ids, gap = list(ids), np.inf
        start = len(ids)
        for _ in range(n):
            x = np.sort(last := self.logits(ids)[-1])
            gap = min(gap, x[-1] - x[-2])
            ids.append(int(last.argmax()))
        return ids[start:], float(gap)

    def check_greedy(self, output: Any, tolerance: float) -> np.ndarray:
        """Each token of a RequestOutput's first continuation has the largest logit but for `tolerance`. Gives log-probabilities."""
        tokens, n = output.outputs[0].token_ids, len(output.prompt_token_ids)
        want = self.logprobs(output.prompt_token_ids + tokens)
        for i, token in enumerate(tokens):
            best = want[n + i - 1]
            assert best[token] > best.max() - tolerance, f"token {i}: {token} is not the most likely one"
        return want


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
