"""Safetensors files and the way from them to device arrays, against transformers' own state dicts."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lora_jax.errors import ModelLoadError
from lora_jax.models.checkpoint import Checkpoint, HFSource, dummy_params, load_params
from lora_jax.models.config import load_config
from lora_jax.models.llama import hf_plan
from lora_jax.models.safetensors_file import read_safetensors

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def one_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def load(folder, plan, dtype=jnp.float32, **kw):
    return load_params(
        Checkpoint.open(folder), plan, **{"dtype": dtype, "sharding": one_device(), "progress": False, **kw}
    )


def save_model(
    folder: Path, model_type: str, dtype: str = "float32", shards: bool = False, **more
) -> dict[str, np.ndarray]:
    """A tiny model of random weights, saved by transformers; returns them in float64, which is exact."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | more)))
    with torch.no_grad():
        for p in model.parameters():  # norms and biases too: transformers starts them as ones and zeros
            p.copy_(torch.randn_like(p))
    model.to(DTYPES[dtype]).save_pretrained(folder, **({"max_shard_size": "8KB"} if shards else {}))
    return {name: t.to(torch.float64).numpy() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("model_type", "stored", "shards", "more"), [
    ("llama", "float32", False, {"attention_bias": True, "mlp_bias": True}),
    ("llama", "bfloat16", True, {"tie_word_embeddings": True}),
    ("mistral", "bfloat16", False, {"head_dim": 16}),
    ("qwen2", "float16", True, {}),
    ("qwen3", "float32", True, {"head_dim": 16}),
])  # fmt: skip
def test_equals_the_state_dict(model_type, stored, shards, more, target, tmp_path):
    state = save_model(tmp_path, model_type, stored, shards, **more)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 if shards else (tmp_path / "model.safetensors").exists()
    plan = hf_plan(load_config(tmp_path)[0])
    params = load(tmp_path, plan, jnp.dtype(target))
    assert params.keys() == plan.keys()
    used = set()
    for path, source in plan.items():
        expected = np.concatenate([state[name] for name in source.names])
        expected = expected.T if source.transpose else expected
        rounded = torch.from_numpy(np.ascontiguousarray(expected)).to(DTYPES[target])
        assert params[path].dtype == target and params[path].shape == source.shape
        np.testing.assert_array_equal(np.asarray(params[path], np.float64), rounded.to(torch.float64).numpy())
        used.update(source.names)
    assert used == state.keys() - ({"lm_head.weight"} if more.get("tie_word_embeddings") else set())


def test_checkpoint_names_dtypes_and_files(tmp_path):
    state = save_model(tmp_path, "llama", "bfloat16", shards=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors.keys() == state.keys() == checkpoint.file_of.keys()
    assert checkpoint.dtype == ml_dtypes.bfloat16
    for name, view in checkpoint.tensors.items():
        np.testing.assert_array_equal(view.astype(np.float64), state[name])
        assert not view.flags.writeable and not view.flags.owndata
        assert name in load_file(tmp_path / checkpoint.file_of[name])


def test_views_of_every_dtype_equal_the_reference_reader(tmp_path):
    rng = np.random.default_rng(0)
    dtypes = [np.dtype(d) for d in ("float16", ml_dtypes.bfloat16, "float32", "float64")]
    # odd sizes: later views are unaligned
    tensors = {f"{d.name}{n}": rng.normal(size=(n, 3)).astype(d) for n in (1, 5) for d in dtypes}
    tensors |= {"scalar": np.full((), 2.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    views = read_safetensors(tmp_path / "x.safetensors")
    assert views.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert views[name].dtype == expected.dtype and views[name].shape == expected.shape
        np.testing.assert_array_equal(views[name].astype(np.float64), expected.astype(np.float64))


PLAN = {
    ("plain",): HFSource(("plain",), (3,)),
    ("joined",): HFSource(("a", "b"), (4, 6), transpose=True, rows=(2, 4)),
    ("model", 0, "same"): HFSource(("same",), (5, 4)),
}


def tensors(dtype: type = np.float32, /, **more: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"plain": (3,), "a": (2, 4), "b": (4, 4), "same": (5, 4)}
    return {**{name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}, **more}


def test_float64_and_mixed_dtypes_are_rounded_once(tmp_path):
    once = np.array([1 + 2**-11 + 2**-30, 0, 0])  # by way of float32 it would become 1
    save_file(tensors(np.float64, plain=once), tmp_path / "model.safetensors")
    assert load(tmp_path, PLAN, jnp.float16)[("plain",)][0] == 1 + 2**-10
    values = tensors(np.float64, a=np.full((2, 4), 1 + 2**-12, np.float16), b=np.full((4, 4), 1 + 2**-20, np.float32))
    save_file(values, tmp_path / "model.safetensors")
    params = load(tmp_path, PLAN)
    np.testing.assert_array_equal(params[("plain",)], values["plain"].astype(np.float32))
    joined = np.concatenate([values["a"].astype(np.float32), values["b"]]).T
    np.testing.assert_array_equal(params[("joined",)], joined)
    assert {p.dtype for p in params.values()} == {jnp.dtype("float32")}


def test_weights_do_not_depend_on_the_file_afterwards(tmp_path):
    """The first tensor is aligned to 64 bytes, so that the CPU backend would use the mapped memory itself."""
    file = tmp_path / "model.safetensors"
    for padding in range(64):
        save_file({"w": np.ones((16, 16), np.float32)}, file, metadata={"pad": " " * padding})
        if struct.unpack("<Q", file.read_bytes()[:8])[0] % 64 == 56:
            break
    assert read_safetensors(file)["w"].ctypes.data % 64 == 0
    params = load(tmp_path, {("w",): HFSource(("w",), (16, 16))})
    with file.open("r+b") as f:
        f.write(bytes(file.stat().st_size))
    np.testing.assert_array_equal(params[("w",)], np.ones((16, 16)))


def test_sharding_of_a_mesh(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    sharding = NamedSharding(jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,)), PartitionSpec())
    for params in (
        load(tmp_path, PLAN, sharding=sharding),
        dummy_params(PLAN, dtype=jnp.bfloat16, sharding=sharding, seed=0),
    ):
        assert {p.sharding for p in params.values()} == {sharding}
        assert all(p.committed for p in params.values())


@pytest.fixture
def compilations():
    """A list with one entry a backend compilation."""
    seen = []

    def listen(event: str, duration_secs: float, **kwargs) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compilations_do_not_grow_with_the_layers(tmp_path, compilations):
    counts = []
    for layers, mlp in ((1, 28), (4, 36)):
        save_model(tmp_path / str(layers), "llama", "bfloat16", num_hidden_layers=layers, intermediate_size=mlp)
        plan = hf_plan(load_config(tmp_path / str(layers))[0])
        jax.clear_caches()
        before = len(compilations)
        load(tmp_path / str(layers), plan)
        dummy_params(plan, dtype=jnp.float32, sharding=one_device(), seed=0)
        counts.append(len(compilations) - before)
    assert counts[0] == counts[1] > 0


def test_progress_counts_stored_bytes_and_is_closed(tmp_path, capsys):
    save_file(tensors(np.float16), tmp_path / "model.safetensors")
    load(tmp_path, PLAN, progress=True)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown and "94.0/94.0" in shown and shown.endswith("\n")
    load(tmp_path, PLAN)
    assert capsys.readouterr().err == ""


# what does not fit


def refusal(folder: Path, plan=PLAN) -> str:
    with pytest.raises(ModelLoadError) as e:
        load(folder, plan)
    assert str(folder) in str(e.value)
    return str(e.value)


def test_missing_extra_and_misshapen_tensors(tmp_path):
    file = tmp_path / "model.safetensors"
    without = tensors()
    del without["a"]
    save_file(without, file)
    assert "lacks 1 tensors" in refusal(tmp_path) and ": a:" in refusal(tmp_path)
    many = {(i,): HFSource((f"t{i}",), (1,)) for i in range(7)}
    message = refusal(tmp_path, PLAN | many)
    assert "lacks 8 tensors" in message and "a, t0, t1, t2, t3 and 3 more" in message
    save_file(tensors(c=np.zeros(2, np.float32)), file)
    assert "1 tensors that config.json does not ask for: c" in refusal(tmp_path)
    save_file(tensors(**{"x.lora_A.weight": np.zeros(2, np.float32)}), file)
    assert "merge" in refusal(tmp_path)
    for bad in [(2, 5), (3, 4), (8,), (2, 4, 1)]:
        save_file(tensors(a=np.zeros(bad, np.float32)), file)
        assert f"a has shape {bad}, expected (2, 4)" in refusal(tmp_path)
    save_file(tensors(a=np.zeros((4, 4), np.float32), b=np.zeros((2, 4), np.float32)), file)  # the sum is right
    assert "a has shape (4, 4), expected (2, 4)" in refusal(tmp_path)
    save_file(tensors(**{"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}), file)
    assert load(tmp_path, PLAN).keys() == PLAN.keys()


def test_a_plan_must_add_up():
    with pytest.raises(ValueError, match="add up to 6"):
        HFSource(("a", "b"), (4, 6), transpose=True, rows=(2, 3))
    with pytest.raises(ValueError, match="add up"):
        HFSource(("a", "b"), (6,))


def test_tied_embeddings_under_either_name_or_both(tmp_path):
    embed = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    plan = {("embed",): HFSource(names[:1], (6, 4))}
    for held in (names[:1], names[1:], names):
        save_file(dict.fromkeys(held, embed), tmp_path / "model.safetensors")
        np.testing.assert_array_equal(load(tmp_path, plan)[("embed",)], embed)
    other = embed.copy()
    other[5, 3] += 1
    for head in (other, embed.astype(np.float16), embed[:5]):
        save_file({names[0]: embed, names[1]: head}, tmp_path / "model.safetensors")
        message = refusal(tmp_path, plan)
        assert "lm_head.weight differs" in message and "tie_word_embeddings" in message


def sharded(folder: Path, shards: dict[str, dict], weight_map: dict | None = None) -> None:
    for file, content in shards.items():
        save_file(content, folder / file)
    listed = {name: file for file, content in shards.items() for name in content}
    index = {"weight_map": listed if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


X = {"x": np.zeros(2, np.float32)}
Y = {"y": np.ones(2, np.float32)}


@pytest.mark.parametrize(("shards", "weight_map", "words"), [
    ({"1.safetensors": X}, {"x": "1.safetensors", "y": "2.safetensors"}, ["2.safetensors", "does not exist"]),
    ({"1.safetensors": X | Y}, {"x": "1.safetensors"}, ["does not list y", "1.safetensors"]),
    ({"1.safetensors": X}, {"x": "1.safetensors", "y": "1.safetensors"}, ["'y' is in 1.safetensors", "no shard has it"]),
    ({"1.safetensors": X, "2.safetensors": Y}, {"x": "2.safetensors", "y": "1.safetensors"}, ["it is in 1.safetensors"]),
    ({"1.safetensors": X, "2.safetensors": X | Y}, {"x": "1.safetensors", "y": "2.safetensors"},
     ["'x' is in both 1.safetensors and 2.safetensors"]),
    ({"1.safetensors": X}, {"x": "../1.safetensors"}, ["weight_map['x']", "../1.safetensors"]),
    ({"1.safetensors": X}, {"x": 1}, ["weight_map['x']"]),
    ({"1.safetensors": X}, {}, ["weight_map"]),
])  # fmt: skip
def test_indices_that_lie(shards, weight_map, words, tmp_path):
    sharded(tmp_path, shards, weight_map)
    with pytest.raises(ModelLoadError) as e:
        Checkpoint.open(tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(e.value)


def test_a_single_file_wins_over_an_index(tmp_path):
    sharded(tmp_path, {"1.safetensors": X})
    assert Checkpoint.open(tmp_path).tensors.keys() == {"x"}
    save_file(Y, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).tensors.keys() == {"y"}


def test_no_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors.*safe_serialization"):
        Checkpoint.open(tmp_path)


def raw_file(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(("content", "words"), [
    (b"", ["no safetensors file", "0 bytes"]),
    (b"abc", ["no safetensors file"]),
    (b"\xff" * 64, ["no safetensors file"]),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", ["git lfs pull"]),
    (raw_file(b"{]"), ["JSON"]),
    (raw_file(b"\xff\xfe"), ["JSON"]),
    (raw_file([1]), ["JSON object"]),
    (raw_file({"w": entry()}), ["cut short", "'w'"]),
    (raw_file({"w": entry()}, bytes(3)), ["cut short", "'w'"]),
    (raw_file({"w": entry()}, bytes(5)), ["1 bytes that belong to no tensor"]),
    (raw_file({"w": entry(offsets=(4, 8))}, bytes(8)), ["'w' starts at byte 4"]),
    (raw_file({"v": entry(), "w": entry()}, bytes(4)), ["'w' starts at byte 0, expected 4"]),
    (raw_file({"w": entry(shape=(2,))}, bytes(4)), ["'w'", "cannot be 4 bytes"]),
    (raw_file({"w": entry(shape=(-1,))}, bytes(4)), ["'w'", "damaged"]),
    (raw_file({"w": entry(offsets=(0,))}, bytes(4)), ["'w'", "damaged"]),
    (raw_file({"w": {"dtype": "F32"}}, bytes(4)), ["'w'", "damaged"]),
    (raw_file({"w": 3}), ["'w'", "damaged"]),
    (raw_file(b'{"w": %b, "w": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)), ["'w' appears twice"]),
    (raw_file({"w": entry("F8_E4M3", (4,))}, bytes(4)), ["'w'", "F8_E4M3", "quantised"]),
    (raw_file({"w": entry("I32")}, bytes(4)), ["'w'", "I32", "quantised"]),
])  # fmt: skip
def test_damaged_files(content, words, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError) as e:
        Checkpoint.open(tmp_path)
    for word in [str(tmp_path / "model.safetensors"), *words]:
        assert word in str(e.value)


# random weights


def dummies(seed=0, dtype=jnp.float32, plan=None):
    plan = plan or {
        ("w", 0): HFSource(("layers.0.w.weight",), (300, 200), transpose=True),
        ("w", 1): HFSource(("layers.1.w.weight",), (300, 200), transpose=True),
        ("norm",): HFSource(("q_norm.weight",), (7,)),
        ("bias",): HFSource(("a.bias", "b.bias"), (5,), rows=(2, 3)),
    }
    return dummy_params(plan, dtype=dtype, sharding=one_device(), seed=seed)


def test_dummy_params_are_normal_and_independent():
    params = dummies()
    flat = {i: np.asarray(params[("w", i)], np.float64).ravel() / 0.02 for i in (0, 1)}
    for x in flat.values():
        n = x.size
        assert abs(x.mean()) < 5 / n**0.5
        assert abs((x**2).mean() - 1) < 5 * (2 / n) ** 0.5
        assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
        assert abs((x[1:] * x[:-1]).mean()) < 5 / n**0.5
        assert abs((x > 1.0).mean() - 0.158655) < 5 * (0.1335 / n) ** 0.5
    assert abs((flat[0] * flat[1]).mean()) < 5 / n**0.5
    assert not set(flat[0][:1000]) & set(flat[1][:1000]) - set(flat[0][1000:])
    np.testing.assert_array_equal(params[("norm",)], np.ones(7))
    np.testing.assert_array_equal(params[("bias",)], np.zeros(5))


def test_dummy_params_depend_on_seed_and_name_alone():
    first, again, other = dummies(0), dummies(0), dummies(1)
    np.testing.assert_array_equal(first[("w", 0)], again[("w", 0)])
    assert (np.asarray(first[("w", 0)]) != np.asarray(other[("w", 0)])).mean() > 0.99
    alone = dummies(plan={("else",): HFSource(("layers.1.w.weight",), (300, 200), transpose=True)})
    np.testing.assert_array_equal(alone[("else",)], first[("w", 1)])
    half = dummies(dtype=jnp.bfloat16)[("w", 0)]
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, first[("w", 0)].astype(jnp.bfloat16))
