"""read_adapter against PEFT: W + scale * B @ A must be what PEFT itself merges, for everything that is accepted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from adapter_folders import HIDDEN, INTER, LAYERS, VOCAB, base_targets

from lora_jax.errors import AdapterError
from lora_jax.lora import peft_config
from lora_jax.lora.adapter import Adapter, peek_rank, read_adapter

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_base(tied: bool = False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INTER,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCAB,
            tie_word_embeddings=tied,
        )
    )


def wrap(base: Any, **fields: Any):
    """A PEFT model around `base`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice and its calls of what transformers deprecates
        return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **fields))


def save(
    folder: Path, *, tied: bool = False, dtype: Any = None, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Saves a PEFT adapter with random weights. Returns the base's weights and PEFT's merged ones, float64, by name."""
    base = make_base(tied)
    before = {k: v.detach().double().numpy().copy() for k, v in base.state_dict().items()}
    model = wrap(base, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on tied embeddings
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.copy_(torch.randn_like(p) * 0.3)
                    if dtype is not None:
                        p.data = p.data.to(dtype)
        model.save_pretrained(str(folder))
        merged = model.float().merge_and_unload()
    return before, {k: v.detach().double().numpy() for k, v in merged.state_dict().items()}


def read(folder: Path, tied: bool = False, **options: Any) -> Adapter:
    return read_adapter(folder, "a", base_targets(), max_rank=64, tied_embeddings=tied, **options)


def assert_merges_to(adapter: Adapter, before: dict[str, Any], merged: dict[str, Any]) -> None:
    """Every weight of the model, those without LoRA included."""
    changed = 0
    for name, want in merged.items():
        got = before[name].copy()
        module = name.removesuffix(".weight")
        if module in adapter.modules:
            w = adapter.modules[module]
            delta = w.b.T.astype(np.float64) @ w.a.astype(np.float64)
            got += delta.T if module == "model.embed_tokens" else delta
            assert np.abs(delta).max() > 0.01
            changed += 1
        np.testing.assert_allclose(got, want, atol=2e-6, err_msg=name)
    assert changed == len(adapter.modules) > 0


CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "fractional-alpha": {"r": 3, "lora_alpha": 12.5, "target_modules": LINEAR},
    "rslora": {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": LINEAR},
    "one-module": {"r": 1, "target_modules": ["k_proj"]},
    "rank-pattern": {"r": 4, "rank_pattern": {"v_proj": 2, r"layers\.1\..*_proj": 8}, "target_modules": LINEAR},
    "alpha-pattern": {
        "r": 4,
        "alpha_pattern": {"mlp": 99, "proj": 98, "layers.1.mlp.up_proj": 64, "v_proj": 5},
        "target_modules": LINEAR,
    },
    "overlapping-patterns": {
        "r": 4,
        "alpha_pattern": {"layers.1.self_attn.q_proj": 64, "q_proj": 4},
        "target_modules": LINEAR,
    },
    "anchored-pattern": {"r": 4, "rank_pattern": {"^model.layers.0.self_attn.q_proj": 2}, "target_modules": ["q_proj"]},
    "patterns-rslora": {
        "r": 4,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 7},
        "target_modules": ["q_proj", "o_proj"],
    },
    "regex": {"r": 4, "target_modules": r".*\.layers\.1\..*\.(q_proj|up_proj)"},
    "layers": {"r": 4, "layers_to_transform": [1], "layers_pattern": "layers", "target_modules": LINEAR},
    "one-layer": {"r": 4, "layers_to_transform": 0, "target_modules": LINEAR},
    "exclude-list": {"r": 4, "exclude_modules": ["k_proj", "model.layers.1.mlp.up_proj"], "target_modules": LINEAR},
    "exclude-regex": {"r": 4, "exclude_modules": r".*layers\.1\..*", "target_modules": LINEAR},
    "lm-head": {"r": 4, "target_modules": ["lm_head", "q_proj"]},
    "embedding": {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens", "q_proj"]},
    "bias-without-biases": {"r": 4, "bias": "lora_only", "target_modules": LINEAR},
    "dropout": {"r": 4, "lora_dropout": 0.5, "target_modules": LINEAR},
    "default-targets": {"r": 4},
    "velora": {"r": 4, "velora_config": {"num_groups": 4}, "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("case", CASES)
def test_accepted_adapters_merge_as_peft_merges(case: str, tmp_path: Path) -> None:
    before, merged = save(tmp_path, **CASES[case])
    adapter = read(tmp_path)
    assert_merges_to(adapter, before, merged)
    assert adapter.report.missing == ()
    assert adapter.rank == peek_rank(tmp_path) == max(w.rank for w in adapter.modules.values())


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone(init: Any, tmp_path: Path) -> None:
    before, merged = save(tmp_path, r=2, init_lora_weights=init, target_modules=["q_proj", "down_proj"])
    assert_merges_to(read(tmp_path), before, merged)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_initialisations_that_change_the_base_are_refused(init: str, tmp_path: Path) -> None:
    save(tmp_path, r=2, init_lora_weights=init, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=f"init_lora_weights='{init}'.*path_initial_model_for_weight_conversion"):
        read(tmp_path)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_converted_pissa_is_plain_lora_on_the_original_base(use_rslora: bool, tmp_path: Path) -> None:
    base = make_base()
    before = {k: v.detach().double().numpy().copy() for k, v in base.state_dict().items()}
    fields = {"r": 2, "init_lora_weights": "pissa", "use_rslora": use_rslora, "target_modules": ["q_proj", "up_proj"]}
    model = wrap(base, **fields)
    model.save_pretrained(str(tmp_path / "start"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(torch.randn_like(p) * 0.3)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    merged = {k: v.detach().double().numpy() for k, v in model.merge_and_unload().state_dict().items()}
    adapter = read(tmp_path / "plain")
    assert adapter.rank == 4
    assert_merges_to(adapter, before, merged)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_one_side_of_tied_embeddings(target: str, tmp_path: Path) -> None:
    save(tmp_path, tied=True, r=4, lora_alpha=6, target_modules=[target, "q_proj"])
    adapter = read(tmp_path, tied=True)
    assert {m.rpartition(".")[2] for m in adapter.modules} == {target, "q_proj"}
    assert any(t.endswith(f"{target}.base_layer.weight") for t in adapter.report.ignored)


def test_tied_training_is_refused(tmp_path: Path) -> None:
    save(tmp_path, tied=True, r=4, ensure_weight_tying=True, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(AdapterError, match="ensure_weight_tying"):
        read(tmp_path, tied=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_stored_dtypes(dtype: str, tmp_path: Path) -> None:
    before, merged = save(tmp_path, r=4, target_modules=LINEAR, dtype=getattr(torch, dtype))
    exact, adapter = read(tmp_path), read(tmp_path, dtype="bfloat16")
    assert_merges_to(exact, before, merged)
    notes = " ".join(adapter.report.notes)
    assert ("float64 to float32" in notes) == (dtype == "float64")
    assert ("to bfloat16" in notes) == (dtype != "bfloat16")
    for name, w in adapter.modules.items():
        for part in ("a", "b"):
            got, want = (getattr(v, part).astype(np.float64) for v in (w, exact.modules[name]))
            assert np.abs(got - want).max() <= np.abs(want).max() * 2**-8


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "use_dora": ({"use_dora": True, "target_modules": ["q_proj"]}, "use_dora"),
    "modules_to_save": ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save"),
    "target_parameters": ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, "target_parameters"),
    "trainable_token_indices": (
        {"trainable_token_indices": [1, 2], "target_modules": ["q_proj"]},
        "trainable_token_indices",
    ),
    "alora": ({"alora_invocation_tokens": [3], "target_modules": ["q_proj"]}, "alora_invocation_tokens"),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 2]], "target_modules": ["q_proj"]}, "layer_replication"),
    "lora_bias": ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias"),
    "kasa": ({"kasa_config": {"beta": 0.0, "gamma": 0.0}, "target_modules": ["q_proj"]}, "kasa_config"),
    "bdlora": (
        {"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2}, "target_modules": ["q_proj"]},
        "use_bdlora",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_saves_but_is_no_plain_lora(case: str, tmp_path: Path) -> None:
    fields, named = REFUSED[case]
    model = wrap(make_base(), r=2, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT takes a bias of lora_B for a broken matrix
        model.save_pretrained(str(tmp_path))
    with pytest.raises(AdapterError, match=f"{named}=.*not supported"):
        read(tmp_path)


def test_every_field_of_peft_has_been_decided() -> None:
    """A new version of PEFT with a new field fails here until somebody has looked at the field."""
    fields = set(peft.LoraConfig.__dataclass_fields__)
    groups = [peft_config.SUPPORTED, peft_config.HARMLESS, frozenset(peft_config.MUST_BE_OFF)]
    assert fields <= frozenset().union(*groups)
    assert sum(map(len, groups)) == len(frozenset().union(*groups)), "a field is in two groups"
