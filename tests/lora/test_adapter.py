"""What read_adapter accepts and reports, with folders written by hand; test_adapter_peft.py compares with PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from adapter_folders import HIDDEN, RANK, VOCAB, base_targets, config, load, pair, tensors, write

from lora_jax.errors import AdapterError
from lora_jax.lora.adapter import for_slots, peek_rank, read_adapter


def test_report(tmp_path: Path) -> None:
    weights = (
        tensors()
        | pair("lm_head", VOCAB, HIDDEN)
        | {"base_model.model.lm_head.base_layer.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    )
    del weights["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"]
    del weights["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    write(tmp_path, config(target_modules=["q_proj", "v_proj", "lm_head"]), weights)
    adapter = load(tmp_path, "french", dtype=ml_dtypes.bfloat16)
    report = adapter.report
    assert (adapter.name, adapter.path, adapter.rank) == ("french", str(tmp_path), RANK)
    assert set(report.applied) == set(adapter.modules) == set(report.ranks) == set(report.scales)
    assert report.ignored == ("base_model.model.lm_head.base_layer.weight",)
    assert report.missing == ("model.layers.1.self_attn.v_proj",)
    assert report.bytes == 2 * sum(w.a.size + w.b.size for w in adapter.modules.values())
    assert set(report.scales.values()) == {1.5}
    assert report.notes == ("8 tensors cast from float32 to bfloat16",)
    assert json.loads(json.dumps(report.as_dict()))["missing"] == ["model.layers.1.self_attn.v_proj"]
    text = str(report)
    for part in ("french", "4 modules", "rank 2", "scale 1.5", "lm_head.base_layer", "1.self_attn.v_proj", "bfloat16"):
        assert part in text


def test_identity_is_the_content(tmp_path: Path) -> None:
    weights = tensors()
    one = load(write(tmp_path / "one", config(), weights), "one")
    spaced = json.dumps(config(lora_dropout=0.1), indent=4)
    same = load(
        write(tmp_path / "two", spaced, {k.replace("base_model.model.", ""): v for k, v in weights.items()}), "two"
    )
    assert same.content_hash == one.content_hash and same.uid != one.uid and same != one
    alpha = load(write(tmp_path / "alpha", config(lora_alpha=4), weights), "one")
    name = next(iter(weights))
    changed = load(write(tmp_path / "changed", config(), weights | {name: weights[name] * np.float32(1.001)}), "one")
    fewer = dict(list(weights.items())[2:])
    assert len({one.content_hash, alpha.content_hash, changed.content_hash}) == 3
    assert load(write(tmp_path / "fewer", config(), fewer)).content_hash != one.content_hash


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", ""),
        (".weight", ".default.weight"),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.", "base_model.model._orig_mod."),
        (".self_attn.", "._checkpoint_wrapped_module.self_attn."),
    ],
)
def test_name_variants_mean_the_same_modules(old: str, new: str, tmp_path: Path) -> None:
    weights = tensors()
    plain = load(write(tmp_path / "plain", config(), weights))
    renamed = load(write(tmp_path / "renamed", config(), {k.replace(old, new): v for k, v in weights.items()}))
    assert renamed.content_hash == plain.content_hash
    assert renamed.report.missing == ()


def test_patterns_follow_the_name_in_training(tmp_path: Path) -> None:
    """An adapter of the inner model: its own names match `^layers`, and not the base's names."""
    inner = {k.replace("base_model.model.model.", "base_model.model."): v for k, v in tensors().items()}
    with pytest.raises(AdapterError, match=r"alpha_pattern give model.layers.0.self_attn.q_proj another .*in doubt"):
        load(write(tmp_path / "a", config(alpha_pattern={"^layers.0.self_attn.q_proj": 9}), inner))
    both = load(write(tmp_path / "b", config(alpha_pattern={"layers.0.self_attn.q_proj": 9}), inner))
    assert both.modules["model.layers.0.self_attn.q_proj"].scale == 4.5


def test_an_overlapping_rank_pattern_is_settled_by_the_tensor(tmp_path: Path) -> None:
    fields = config(rank_pattern={"layers.*": 4, "q_proj": RANK}, target_modules=["q_proj"])
    weights = pair("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN)
    assert load(write(tmp_path / "a", fields, weights)).modules["model.layers.0.self_attn.q_proj"].scale == 1.5
    with pytest.raises(AdapterError, match="r disagrees.* rank 4 or 2, but .* has rank 3"):
        load(write(tmp_path / "b", fields, pair("model.layers.0.self_attn.q_proj", HIDDEN, HIDDEN, rank=3)))


@pytest.mark.parametrize(
    "extra",
    [
        {"future_option": None, "another": False, "third": [], "fourth": {}, "fifth": 0, "sixth": ""},
        {"bias": "all"},
        {"fan_in_fan_out": True},
        {"task_type": None},
        {"runtime_config": {"ephemeral_gpu_offload": True}},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"corda_config": {"corda_method": "ipm"}, "loftq_config": {"loftq_bits": 4}},
        {"ensure_weight_tying": True},
        {"merge_weights": True, "enable_lora": None},
    ],
)
def test_fields_that_change_nothing(extra: dict, tmp_path: Path) -> None:
    plain = load(write(tmp_path / "a", config(), tensors()))
    folder = write(tmp_path / "b", config() | extra, tensors())
    assert load(folder, tied_embeddings=True).content_hash == plain.content_hash


def test_defaults_of_absent_fields(tmp_path: Path) -> None:
    write(tmp_path, {"peft_type": "LORA"}, tensors(rank=8))
    assert {w.scale for w in load(tmp_path).modules.values()} == {1.0}


def test_copies_of_base_weights(tmp_path: Path) -> None:
    base = {
        n: np.random.default_rng(0).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
        for n in ("lm_head.weight", "model.embed_tokens.weight")
    }
    copies = {"base_model.model.lm_head.weight": base["lm_head.weight"].astype(ml_dtypes.bfloat16)}
    copies["base_model.model.model.embed_tokens.weight"] = base["model.embed_tokens.weight"]
    folder = write(tmp_path / "a", config(), tensors() | copies)
    assert load(folder, base_tensor=base.__getitem__).report.ignored == tuple(sorted(copies))
    with pytest.raises(AdapterError, match=r"lm_head.weight.*modules_to_save"):
        load(folder)  # without the base's weights a copy and a replacement look the same
    copies["base_model.model.lm_head.weight"] = (base["lm_head.weight"] * 1.01).astype(ml_dtypes.bfloat16)
    with pytest.raises(AdapterError, match=r"lm_head.weight.*differs"):
        load(write(tmp_path / "b", config(), tensors() | copies), base_tensor=base.__getitem__)
    grown = {"base_model.model.model.embed_tokens.base_layer.weight": np.zeros((VOCAB + 2, HIDDEN), np.float32)}
    with pytest.raises(AdapterError, match=r"\[12, 8\].*\[10, 8\].*resized vocabulary"):
        load(write(tmp_path / "c", config(), tensors() | grown))


def test_scale_is_folded_in_float32_and_rounded_once() -> None:
    b = np.arange(1, 257, dtype=np.float32).astype(ml_dtypes.bfloat16)[:, None]
    want = (b.astype(np.float64) * (3 / 7)).astype(np.float32).astype(ml_dtypes.bfloat16)
    got = for_slots("m", np.ones((1, 1), np.float32), b, 3 / 7, ml_dtypes.bfloat16).b
    assert got.dtype == ml_dtypes.bfloat16 and got.flags.c_contiguous
    np.testing.assert_array_equal(got, want.T)
    rounded_scale = np.array(3 / 7, ml_dtypes.bfloat16).astype(np.float32)
    twice = (b.astype(np.float32) * rounded_scale).astype(ml_dtypes.bfloat16)
    assert (twice != want).any(), "these values cannot tell one rounding from two"


def test_what_overflows_the_slots_dtype_is_refused_by_name(tmp_path: Path) -> None:
    weights = {k: v * np.float32(1e4) if "0.self_attn.q_proj.lora_B" in k else v for k, v in tensors().items()}
    folder = write(tmp_path, config(lora_alpha=64), weights)
    assert load(folder, dtype="bfloat16").rank == RANK
    with pytest.raises(AdapterError, match=r"lora_B of model.layers.0.self_attn.q_proj \(scale 32\) overflows float16"):
        load(folder, dtype="float16")
    huge = {k: v * np.float32(1e6) if "1.self_attn.v_proj.lora_A" in k else v for k, v in tensors().items()}
    with pytest.raises(AdapterError, match="lora_A of model.layers.1.self_attn.v_proj overflows float16"):
        load(write(tmp_path / "a", config(), huge), dtype="float16")
    with pytest.raises(AdapterError, match="overflows float32"):
        load(write(tmp_path / "b", config(lora_alpha=1e300), tensors()))
    wide = {k: v.astype(np.float64) * 1e200 for k, v in tensors().items()}
    with pytest.raises(AdapterError, match="overflows float32"):
        load(write(tmp_path / "c", config(), wide))


def test_targets_decide_what_can_be_served(tmp_path: Path) -> None:
    targets = {n: t for n, t in base_targets().items() if n.endswith("q_proj")}
    write(tmp_path, config(), tensors())
    with pytest.raises(AdapterError, match="v_proj.lora_A.*LoRA can be served on q_proj of this base"):
        read_adapter(tmp_path, "a", targets, max_rank=8, tied_embeddings=False)


def test_arrays_are_read_only(tmp_path: Path) -> None:
    w = load(write(tmp_path, config(), tensors())).modules["model.layers.0.self_attn.q_proj"]
    with pytest.raises(ValueError, match="read-only"):
        w.a[0, 0] = 1


def test_peek_rank_reads_the_header(tmp_path: Path) -> None:
    weights = tensors() | pair("model.embed_tokens", HIDDEN, VOCAB, rank=5, embedding=True)
    folder = write(tmp_path, config(target_modules=None, rank_pattern={"embed_tokens": 5}), weights)
    assert peek_rank(folder) == 5 == load(folder).rank
    assert load(folder).modules["model.embed_tokens"].a.shape == (5, VOCAB)
    with pytest.raises(AdapterError, match="peft_type"):
        peek_rank(write(tmp_path, config(peft_type="IA3"), None))
