"""Every kind of adapter that cannot be served: the error must name the field or tensor."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapter_folders import HIDDEN, INTER, KV, VOCAB, config, load, pair, tensors, write

from lora_jax.errors import AdapterError

STEM = "base_model.model.model.layers"
Q0 = f"{STEM}.0.self_attn.q_proj"

FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no-peft-type": ({"peft_type": None}, "no peft_type"),
    "ia3": ({"peft_type": "IA3"}, "peft_type='IA3'"),
    "lower-case": ({"peft_type": "lora"}, "peft_type='lora'"),
    "seq-cls": ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
    "bias": ({"bias": "some"}, "bias='some'"),
    "dora": ({"use_dora": True}, "use_dora=True"),
    "lora-bias": ({"lora_bias": True}, "lora_bias=True"),
    "save": ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    "parameters": ({"target_parameters": ["x.weight"]}, "target_parameters="),
    "tokens": ({"trainable_token_indices": {"embed_tokens": [1]}}, "trainable_token_indices="),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens="),
    "replication": ({"layer_replication": [[0, 2]]}, "layer_replication="),
    "megatron": ({"megatron_config": {"hidden_size": 8}}, "megatron_config="),
    "qalora": ({"use_qalora": True}, "use_qalora="),
    "bdlora": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora="),
    "arrow": ({"arrow_config": {"top_k": 3}}, "arrow_config="),
    "kasa": ({"kasa_config": {"beta": 0.0}}, "kasa_config="),
    "monteclora": ({"monteclora_config": {"num_samples": 2}}, "monteclora_config="),
    "old-fused": ({"enable_lora": [True, False, True]}, "enable_lora="),
    "unknown": ({"use_future_math": True}, "use_future_math=True.*unknown"),
    "unknown-object": ({"future": {"a": 0}}, "future=.*unknown"),
    "runtime": ({"runtime_config": {"new_trick": 1}}, "runtime_config="),
    "pissa": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
    "olora": ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA'"),
    "corda": ({"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
    "new-init": ({"init_lora_weights": "sorcery"}, "init_lora_weights='sorcery'.*unknown"),
    "init-number": ({"init_lora_weights": 3}, "init_lora_weights=3"),
    "r-zero": ({"r": 0}, "r must be an integer >= 1, got 0"),
    "r-negative": ({"r": -4}, "r must be an integer >= 1, got -4"),
    "r-float": ({"r": 2.0}, "r must be an integer"),
    "r-bool": ({"r": True}, "r must be an integer"),
    "r-disagrees": ({"r": 4}, f"r disagrees.*q_proj rank 4, but tensor '{Q0}.lora_A.weight' has rank 2"),
    "rank-pattern": ({"rank_pattern": {"v_proj": 4}}, "r disagrees.*v_proj"),
    "rank-pattern-zero": ({"rank_pattern": {"v_proj": 0}}, r"rank_pattern\['v_proj'\] must be an integer"),
    "rank-pattern-list": ({"rank_pattern": ["v_proj"]}, "rank_pattern must map"),
    "rank-pattern-regex": ({"rank_pattern": {"(v_proj": 2}}, r"rank_pattern holds '\(v_proj', no regular expression"),
    "alpha-string": ({"lora_alpha": "16"}, "lora_alpha must be a finite number, got '16'"),
    "alpha-bool": ({"lora_alpha": True}, "lora_alpha must be"),
    "alpha-too-long": ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
    "alpha-pattern": ({"alpha_pattern": {"q_proj": "x"}}, r"alpha_pattern\['q_proj'\] must be"),
    "rslora": ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    "targets": ({"target_modules": [1]}, "target_modules must be a string or a list"),
    "targets-regex": ({"target_modules": "*_proj"}, "target_modules holds .* no regular expression"),
    "targets-leave-out": ({"target_modules": ["q_proj"]}, "v_proj.lora_A.*the configuration leaves out"),
    "targets-empty": ({"target_modules": []}, "the configuration leaves out"),
    "exclude": ({"exclude_modules": ["v_proj"]}, "v_proj.lora_A.*leaves out.*exclude_modules"),
    "layers": ({"layers_to_transform": [0]}, "layers.1.*leaves out.*layers_to_transform"),
    "layers-type": ({"layers_to_transform": ["0"]}, "layers_to_transform must be layer numbers"),
    "layers-regex": ({"target_modules": ".*_proj", "layers_to_transform": [0, 1]}, "layers_to_transform="),
}


def refuse(folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(AdapterError, match=match) as e:
        load(folder, "tenant", **options)
    assert "tenant" in str(e.value) and str(folder) in str(e.value)


@pytest.mark.parametrize("case", FIELDS)
def test_fields(case: str, tmp_path: Path) -> None:
    changes, match = FIELDS[case]
    refuse(write(tmp_path, config(**changes), tensors()), match)


def test_the_configuration_is_checked_before_the_weights_are_opened(tmp_path: Path) -> None:
    refuse(write(tmp_path, config(use_dora=True), b"no safetensors"), "use_dora")


ONE = np.ones((2, 8), np.float32)
DROP = None
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "magnitude": ({f"{Q0}.lora_magnitude_vector": np.ones(8, np.float32)}, "lora_magnitude_vector.*use_dora"),
    "magnitude-weight": (
        {f"{Q0}.lora_magnitude_vector.weight": np.ones(8, np.float32)},
        "lora_magnitude_vector.*use_dora",
    ),
    "bias": ({f"{Q0}.base_layer.bias": np.ones(8, np.float32)}, "q_proj.base_layer.bias.*bias"),
    "lora-bias": ({f"{Q0}.lora_B.bias": np.ones(8, np.float32)}, "lora_B.bias.*lora_bias"),
    "unknown": ({f"{Q0}.lora_C.weight": ONE}, "lora_C.weight.*unknown meaning"),
    "adalora": ({f"{Q0}.lora_E": ONE}, "lora_E.*unknown meaning"),
    "velora-without-its-field": ({f"{Q0}.lora_velora_embed": ONE}, "lora_velora_embed.*unknown meaning"),
    "norm": ({"base_model.model.model.norm.weight": ONE[0]}, "norm.weight.*unknown meaning"),
    "head": (
        {"base_model.model.lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)},
        "lm_head.weight.*modules_to_save",
    ),
    "saved": ({"base_model.model.lm_head.modules_to_save.default.weight": ONE}, "modules_to_save"),
    "linear-copy": ({f"{Q0}.base_layer.weight": np.ones((8, 8), np.float32)}, "base_layer.weight.*replaces a weight"),
    "token-adapter": (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": ONE},
        "trainable_token_indices",
    ),
    "no-a": ({f"{Q0}.lora_A.weight": DROP}, f"'{Q0}.lora_B.weight' is lora_B without its lora_A"),
    "no-b": ({f"{Q0}.lora_B.weight": DROP}, f"'{Q0}.lora_A.weight' is lora_A without its lora_B"),
    "transposed-a": (
        {f"{Q0}.lora_A.weight": ONE.T},
        r"lora_A.weight' has shape \[8, 2\], expected \[r, 8\].*transposed",
    ),
    "transposed-b": ({f"{Q0}.lora_B.weight": ONE}, r"lora_B.weight' has shape \[2, 8\], expected \[8, r\].*transposed"),
    "width": (
        {f"{Q0}.lora_A.weight": np.ones((2, 12), np.float32)},
        r"lora_A.weight' has shape \[2, 12\].*another base",
    ),
    "vector": ({f"{Q0}.lora_A.weight": ONE[0]}, r"lora_A.weight' has shape \[8\]"),
    "ranks": ({f"{Q0}.lora_B.weight": np.ones((8, 3), np.float32)}, "one rank, got 2 and 3"),
    "no-rows": ({f"{Q0}.lora_A.weight": np.ones((0, 8), np.float32)}, r"has shape \[0, 8\]"),
    "int8": ({f"{Q0}.lora_A.weight": ONE.astype(np.int8)}, "lora_A.weight' has dtype I8"),
    "float8": ({f"{Q0}.lora_A.weight": ONE.astype(ml_dtypes.float8_e4m3fn)}, "lora_A.weight' has dtype F8_E4M3"),
    "nan": ({f"{Q0}.lora_A.weight": ONE * np.nan}, f"'{Q0}.lora_A.weight' holds NaN"),
    "inf": (
        {f"{Q0}.lora_B.weight": (ONE.T * np.inf).astype(ml_dtypes.bfloat16)},
        f"'{Q0}.lora_B.weight' holds NaN or inf",
    ),
    "two-adapters": ({f"{Q0}.lora_A.second.weight": ONE}, "both are lora_A of"),
    "mixed-names": (
        {
            f"{STEM}.0.self_attn.k_proj.lora_A.second.weight": ONE,
            f"{STEM}.0.self_attn.k_proj.lora_B.second.weight": ONE[:, :4].T,
        },
        "belong to two adapters",
    ),
    "twice": (
        {"model.layers.0.self_attn.q_proj.lora_A.weight": ONE},
        "both are lora_A of model.layers.0.self_attn.q_proj",
    ),
    "embedding-kind": ({f"{Q0}.lora_embedding_A": ONE}, "lora_embedding_A' is LoRA of a layer of kind embedding"),
    "linear-kind": ({"base_model.model.model.embed_tokens.lora_A.weight": ONE}, "embed_tokens.*of kind linear"),
    "vision": (
        {"base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight": ONE},
        "vision_tower.*no place",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, tmp_path: Path) -> None:
    changes, match = TENSORS[case]
    weights = {k: np.ascontiguousarray(v) for k, v in (tensors() | changes).items() if v is not DROP}
    refuse(write(tmp_path, config(target_modules=None), weights), match)


def test_other_bases(tmp_path: Path) -> None:
    deep = write(tmp_path / "deep", config(), tensors(layers=3))
    refuse(deep, r"layers.2.self_attn.q_proj.*this base has layers 0 to 1, the adapter was made for a deeper one")
    gate_up = pair("model.layers.0.mlp.gate_up_proj", 2 * INTER, HIDDEN)
    qkv = pair("model.layers.0.self_attn.qkv_proj", HIDDEN + 2 * KV, HIDDEN)
    refuse(
        write(tmp_path / "gate", config(target_modules=None), gate_up),
        "fused gate_up_proj, this base has gate_proj, up_proj",
    )
    refuse(
        write(tmp_path / "qkv", config(target_modules=None), qkv),
        "fused qkv_proj, this base has q_proj, k_proj, v_proj",
    )
    alien = pair("transformer.h.0.attn.c_attn", HIDDEN, HIDDEN)
    refuse(
        write(tmp_path / "alien", config(target_modules=None), alien),
        "c_attn.*no place.*LoRA can be served on down_proj",
    )


def test_ranks_beyond_the_slots(tmp_path: Path) -> None:
    folder = write(tmp_path, config(), tensors())
    refuse(folder, "rank 2, more than max_lora_rank=1", max_rank=1)


def test_what_applies_nothing(tmp_path: Path) -> None:
    refuse(write(tmp_path / "a", config(), {}), "holds no tensors.*change nothing")
    copy = {"base_model.model.lm_head.base_layer.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    refuse(write(tmp_path / "b", config(), copy), "only copies of base weights")


def test_tied_training(tmp_path: Path) -> None:
    weights = tensors() | pair("lm_head", VOCAB, HIDDEN)
    folder = write(tmp_path, config(target_modules=None, ensure_weight_tying=True), weights)
    refuse(folder, "ensure_weight_tying.*lm_head", tied_embeddings=True)
    assert "lm_head" in load(folder).modules


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


A, B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
F32 = {"dtype": "F32", "shape": [2, 8]}
WEIGHTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "short": (b"\x01\x02", "2 bytes"),
    "huge-header": (struct.pack("<Q", 1 << 60) + b"{}", "header of 1152921504606846976 bytes"),
    "cut-header": (header({A: F32 | {"data_offsets": [0, 64]}})[:40], "announces a header"),
    "garbage": (bytes(range(256)), "announces a header"),
    "no-json": (struct.pack("<Q", 4) + b"abcd", "not valid JSON"),
    "no-object": (struct.pack("<Q", 2) + b"[]", "must hold a JSON object"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, "not valid JSON"),
    "twice": (struct.pack("<Q", 25) + b'{"a": {}, "b": 1, "a": 2}', "the key 'a' twice"),
    "cut-data": (header({A: F32 | {"data_offsets": [0, 64]}}, bytes(63)), "interrupted copy"),
    "more-data": (header({A: F32 | {"data_offsets": [0, 64]}}, bytes(65)), "interrupted copy"),
    "overlap": (
        header({A: F32 | {"data_offsets": [0, 64]}, B: F32 | {"data_offsets": [32, 96]}}, bytes(96)),
        "overlap",
    ),
    "hole": (header({A: F32 | {"data_offsets": [8, 72]}}, bytes(72)), "overlap others or leave a hole"),
    "wrong-size": (header({A: F32 | {"data_offsets": [0, 32]}}, bytes(32)), "32 bytes for F32"),
    "negative": (header({A: F32 | {"data_offsets": [-64, 0]}}), "malformed entry"),
    "backwards": (header({A: F32 | {"data_offsets": [64, 0]}}, bytes(64)), "malformed entry"),
    "no-shape": (header({A: {"dtype": "F32", "data_offsets": [0, 0]}}), "malformed entry"),
    "number": (header({A: 7}), "malformed entry"),
    "giant-shape": (
        header({A: {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 64]}}, bytes(64)),
        "64 bytes",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_files(case: str, tmp_path: Path) -> None:
    content, match = WEIGHTS[case]
    refuse(write(tmp_path, config(), content), match)


CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "not valid JSON"),
    "cut": ('{"peft_type": "LORA", ', "not valid JSON"),
    "list": ("[]", "must hold a JSON object, got list"),
    "null": ("null", "must hold a JSON object"),
    "twice": ('{"peft_type": "LORA", "r": 8, "r": 16}', "holds the key 'r' twice"),
    "twice-inside": ('{"peft_type": "LORA", "alpha_pattern": {"q": 1, "q": 2}}', "holds the key 'q' twice"),
    "nan": ('{"peft_type": "LORA", "lora_alpha": NaN}', "holds NaN"),
    "infinity": ('{"peft_type": "LORA", "lora_alpha": 1e999}', "lora_alpha must be a finite number"),
    "digits": ('{"peft_type": "LORA", "lora_alpha": ' + "9" * 5000 + "}", "not valid JSON"),
    "binary": (b"\xff\xfe\x00", "not valid JSON"),
    "deep": ('{"a": ' + "[" * 200_000, "not valid JSON"),
    "huge": (b'{"a": "' + b"x" * (17 << 20) + b'"}', "larger than 16 MiB"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_files(case: str, tmp_path: Path) -> None:
    content, match = CONFIGS[case]
    refuse(write(tmp_path, content, tensors()), match)
