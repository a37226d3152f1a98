"""Reading the two files of an adapter folder as untrusted input. Host only: never imports jax.

Weights are read, never memory-mapped: a trainer that rewrites the file in place would otherwise crash the server with a
bus error. Nothing is allocated before the header, the file's size and the caller's shape checks agree. Pickles are
never opened.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from ..errors import AdapterError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"

MAX_CONFIG_BYTES = 16 << 20
MAX_HEADER_BYTES = 100 << 20

FLOAT_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def resolve_adapter_path(path: str | os.PathLike[str], allowed_root: str | os.PathLike[str] | None = None) -> Path:
    """The real folder that `path` means.

    allowed_root: the folder that a remote caller may load from. The adapter folder and its files, symbolic links
    followed, must lie inside; a relative path starts there. None: an operator named the path, anything goes.

    Raises: AdapterError when the path is empty, malformed or leads outside.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise AdapterError(f"the adapter path {text!r} is not a path: give the folder that holds {CONFIG_NAME}")
    try:
        if allowed_root is None:
            return Path(text).resolve()
        root = Path(allowed_root).resolve()
        folder = (root / text).resolve()
        inside = [folder, *((folder / name).resolve() for name in (CONFIG_NAME, WEIGHTS_NAME))]
    except (OSError, RuntimeError, ValueError) as e:
        raise AdapterError(f"the adapter path {text!r} cannot be resolved: {e}") from None
    if not all(p.is_relative_to(root) for p in inside):
        raise AdapterError(f"the adapter path {text!r} leads outside the folder that adapters may be loaded from")
    return folder


def require_folder(folder: Path) -> None:
    """Raises AdapterError unless `folder` is an existing directory."""
    try:
        mode = folder.stat().st_mode
    except (OSError, ValueError) as e:
        raise AdapterError(f"the folder cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if not stat.S_ISDIR(mode):
        raise AdapterError(f"the path is not a folder: give the one that holds {CONFIG_NAME}")


def file_versions(folder: Path) -> list[tuple[int, int, int] | None]:
    """Tells whether an adapter's files are the same as at another time."""

    def version(file: Path) -> tuple[int, int, int] | None:
        try:
            found = file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    return [version(folder / name) for name in (CONFIG_NAME, WEIGHTS_NAME)]


def _open_regular(file: Path, if_missing: Callable[[Path], str]) -> io.BufferedReader:
    """Opens a regular file; O_NONBLOCK keeps a named pipe from blocking the open for ever."""
    try:
        fd = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise AdapterError(if_missing(file.parent)) from None
    except OSError as e:
        raise AdapterError(f"{file.name} cannot be opened: {e.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AdapterError(f"{file.name} is not a regular file")
    return os.fdopen(fd, "rb")


def read_config_json(folder: Path) -> dict[str, Any]:
    """The object in adapter_config.json, in file order.

    Raises: AdapterError for a file that is missing, larger than 16 MiB, no UTF-8 JSON object, holds a key twice or NaN.
    """
    with _open_regular(folder / CONFIG_NAME, _why_no_config) as f:
        raw = f.read(MAX_CONFIG_BYTES + 1)
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_NAME} is larger than {MAX_CONFIG_BYTES >> 20} MiB: it is no PEFT configuration")
    return _json_object(raw, CONFIG_NAME)


def _why_no_config(folder: Path) -> str:
    nested = sorted(p.parent.name for p in folder.glob(f"*/{CONFIG_NAME}"))[:5]
    hint = f"; did you mean its subfolder {', '.join(nested)}?" if nested else ": it is no PEFT adapter"
    return f"the folder has no {CONFIG_NAME}{hint}"


def _json_object(raw: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))
            raise AdapterError(f"{what} holds the key {twice!r} twice: which one counts is in doubt")
        return out

    def no_constant(text: str) -> NoReturn:
        raise AdapterError(f"{what} holds {text}, which is not a finite number")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except AdapterError:
        raise
    except (ValueError, RecursionError) as e:
        raise AdapterError(f"{what} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{what} must hold a JSON object, got {type(value).__name__}")
    return value


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a safetensors header. start and end: byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsReader:
    """adapter_model.safetensors of a folder, its header checked. Use as a context manager.

    tensors: name -> TensorInfo. Raises: AdapterError for a missing, cut or malformed file.
    """

    def __init__(self, folder: Path):
        self._file = _open_regular(folder / WEIGHTS_NAME, _why_no_weights)
        try:
            self.tensors = self._read_header(os.fstat(self._file.fileno()).st_size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def _read_header(self, size: int) -> dict[str, TensorInfo]:
        if size < 8:
            raise AdapterError(f"{WEIGHTS_NAME} holds {size} bytes: it is no safetensors file (an interrupted copy?)")
        length = int.from_bytes(self._file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise AdapterError(
                f"{WEIGHTS_NAME} announces a header of {length} bytes in a file of {size}: cut, or no safetensors file"
            )
        header = _json_object(self._file.read(length), f"the header of {WEIGHTS_NAME}")
        header.pop("__metadata__", None)
        tensors = {name: _tensor_info(name, entry, 8 + length) for name, entry in header.items()}
        position = 8 + length
        for info in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
            if info.start != position:
                raise AdapterError(f"{WEIGHTS_NAME}: the bytes of tensor {info.name!r} overlap others or leave a hole")
            position = info.end
        if position != size:
            raise AdapterError(
                f"{WEIGHTS_NAME} holds {size} bytes, its header describes {position}: an interrupted copy?"
            )
        return tensors

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` in its stored dtype, which must be one of FLOAT_DTYPES."""
        info = self.tensors[name]
        data = np.empty(info.end - info.start, np.uint8)
        self._file.seek(info.start)
        if self._file.readinto(data.data) != len(data):
            raise AdapterError(f"{WEIGHTS_NAME} became shorter while tensor {name!r} was read")
        return data.view(FLOAT_DTYPES[info.dtype]).reshape(info.shape)


def _tensor_info(name: str, entry: Any, base: int) -> TensorInfo:
    def count(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= 0

    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    good = isinstance(dtype, str) and isinstance(shape, list) and isinstance(span, list)
    if not good or not all(map(count, shape)) or not all(map(count, span)) or len(span) != 2 or span[0] > span[1]:
        raise AdapterError(f"the header of {WEIGHTS_NAME} has a malformed entry for tensor {name!r}")
    if dtype in FLOAT_DTYPES and math.prod(shape) * FLOAT_DTYPES[dtype].itemsize != span[1] - span[0]:
        raise AdapterError(
            f"the header of {WEIGHTS_NAME} gives tensor {name!r} {span[1] - span[0]} bytes for {dtype} {shape}"
        )
    return TensorInfo(name, dtype, tuple(shape), base + span[0], base + span[1])


def _why_no_weights(folder: Path) -> str:
    if (folder / PICKLE_NAME).exists():
        return (
            f"the folder has only {PICKLE_NAME}, a pickle, which could run code and is never opened: save the adapter "
            "again with PEFT's save_pretrained(..., safe_serialization=True)"
        )
    if any(folder.glob("adapter_model*.safetensors*")):
        return f"the folder has no {WEIGHTS_NAME}: an adapter in several files is not supported, save it as one"
    return f"the folder has no {WEIGHTS_NAME}: it holds a configuration without weights"
