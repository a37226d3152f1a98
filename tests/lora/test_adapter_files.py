"""Adapter folders as untrusted input: missing files, pickles, links, pipes, and paths that lead elsewhere."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from adapter_folders import config, load, tensors, write

from lora_jax.errors import AdapterError
from lora_jax.lora.adapter import resolve_adapter_path


class Trap:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", config(), None)
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(AdapterError, match="adapter_model.bin, a pickle.*never opened.*safe_serialization=True"):
        load(folder)
    write(folder, None, tensors())
    assert load(folder).rank == 2  # safetensors beside it win
    assert not (tmp_path / "ran").exists()


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="'tenant'.*no adapter_config.json"):
        load(write(tmp_path / "a", None, tensors()), "tenant")
    with pytest.raises(AdapterError, match="no adapter_model.safetensors"):
        load(write(tmp_path / "b", config(), None))
    with pytest.raises(AdapterError, match="did you mean its subfolder b, c"):
        write(tmp_path / "c", config(), tensors())
        load(tmp_path)
    (tmp_path / "b" / "adapter_model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(AdapterError, match="several files is not supported"):
        load(tmp_path / "b")


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="No such file"):
        load(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(AdapterError, match="not a folder"):
        load(file)
    with pytest.raises(AdapterError, match="cannot be read"):
        load(Path("a" * 5000))
    with pytest.raises(AdapterError, match="cannot be read"):
        load(Path("a\0b"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_no_files(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, config(), tensors())
    (folder / name).unlink()
    os.mkfifo(folder / name)  # opening it for reading would block for ever
    with pytest.raises(AdapterError, match=f"{name} is not a regular file"):
        load(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(AdapterError, match=f"{name} is not a regular file"):
        load(folder)
    (folder / name).rmdir()
    (folder / name).symlink_to("nowhere")
    with pytest.raises(AdapterError, match=f"no {name}"):
        load(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(AdapterError, match=f"{name} cannot be opened"):
        load(folder)


def test_an_operator_may_use_links(tmp_path: Path) -> None:
    """As in a hub cache: snapshots/x/adapter_model.safetensors -> ../../blobs/hash."""
    blobs = write(tmp_path / "blobs", config(), tensors())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert load(snapshot).rank == 2
    assert resolve_adapter_path(snapshot) == snapshot
    assert resolve_adapter_path("snapshot", tmp_path) == snapshot


def test_a_remote_caller_stays_inside(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path / "outside", config(), tensors())
    root.mkdir()
    inside = write(root / "a", config(), tensors())
    assert resolve_adapter_path("a", root) == inside == resolve_adapter_path(str(inside), root)
    assert resolve_adapter_path("a/../a/.", root) == inside
    (root / "link").symlink_to(outside)
    files = root / "files"
    files.mkdir()
    for file in outside.iterdir():
        (files / file.name).symlink_to(file)
    sibling = write(tmp_path / "rooted", config(), tensors())  # shares the root's name as a prefix
    for bad in (
        "..",
        "../outside",
        str(outside),
        "link",
        "files",
        "a/../../outside",
        str(sibling),
        "/etc",
        "~/a/../../..",
    ):
        with pytest.raises(AdapterError, match="leads outside"):
            resolve_adapter_path(bad, root)
    for bad in ("", "a\0b"):
        with pytest.raises(AdapterError, match="not a path"):
            resolve_adapter_path(bad, root)
    (root / "loop").symlink_to("loop")
    with pytest.raises(AdapterError):
        load(resolve_adapter_path("loop", root))
