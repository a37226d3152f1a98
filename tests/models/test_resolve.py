"""What a user may call a model, and what each wrong name is answered with."""

from __future__ import annotations

import json

import pytest

from lora_jax.errors import ModelLoadError
from lora_jax.models.resolve import resolve_model


def touch(folder, *names):
    for name in names:
        (folder / name).write_text("{}")
    return str(folder)


def refusal(model, **kw) -> str:
    with pytest.raises(ModelLoadError) as e:
        resolve_model(model, **kw)
    return str(e.value)


def test_local_folders(tmp_path):
    model = touch(tmp_path, "config.json", "model.safetensors")
    assert resolve_model(model) == tmp_path
    assert "revision='main'" in refusal(model, revision="main")
    (tmp_path / "model.safetensors").unlink()
    assert resolve_model(model, weights=False) == tmp_path
    touch(tmp_path, "model.safetensors.index.json")
    assert resolve_model(model) == tmp_path


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    for extra in ([], ["config.json"]):
        message = refusal(touch(tmp_path, *extra))
        assert "adapter" in message and "owner/base" in message and f"--lora-modules NAME={tmp_path}" in message
    assert resolve_model(touch(tmp_path, "model.safetensors")) == tmp_path


@pytest.mark.parametrize(("files", "words"), [
    ([], ["config.json"]),
    (["config.json"], ["model.safetensors"]),
    (["model.safetensors"], ["no config.json"]),
    (["config.json", "pytorch_model.bin"], ["pytorch_model.bin", "safe_serialization"]),
    (["params.json", "consolidated.00.pth"], ["consolidated.00.pth", "convert"]),
    (["config.json", "model.Q4_K_M.gguf"], ["GGUF", "model.Q4_K_M.gguf"]),
    (["config.json", "consolidated.safetensors"], ["consolidated.safetensors", "convert"]),
    (["config.json", "model-00001-of-00002.safetensors"], ["model-00001-of-00002.safetensors", "index"]),
])  # fmt: skip
def test_folders_without_usable_weights(files, words, tmp_path):
    message = refusal(touch(tmp_path, *files))
    for word in [str(tmp_path), *words]:
        assert word in message


def test_files_and_missing_folders(tmp_path):
    touch(tmp_path, "a.gguf", "model.safetensors")
    assert "GGUF" in refusal(str(tmp_path / "a.gguf"))
    assert "folder" in refusal(str(tmp_path / "model.safetensors"))
    for name in (str(tmp_path / "none"), "./none", "~/none/x", "a/b/c", "../x/y"):
        assert repr(name) in refusal(name)


def test_hub_ids(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def download(repo, *, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        if repo == "owner/none":
            raise OSError("no such repository\nsecond line")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    touch(tmp_path, "config.json", "model.safetensors")
    assert resolve_model("owner/name", "v1") == tmp_path
    repo, revision, patterns = asked.pop()
    assert (repo, revision) == ("owner/name", "v1") and "*.json" in patterns and "model*.safetensors" in patterns
    assert resolve_model("owner/name", weights=False) == tmp_path
    assert not any("safetensors" in p for p in asked.pop()[2])
    message = refusal("owner/none", revision="v2")
    assert "owner/none" in message and "v2" in message and "no such repository" in message and "second" not in message


def test_hub_without_network(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = refusal("owner/surely-not-cached")
    assert "owner/surely-not-cached" in message and "network" in message
