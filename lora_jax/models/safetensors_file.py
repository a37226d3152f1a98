"""One safetensors file as memory-mapped numpy views: nothing is copied, nothing is executed. Host only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ModelLoadError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER = 100_000_000  # as in the reference implementation


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensor name -> read-only view of the mapped file, in its stored dtype.

    Raises: ModelLoadError naming the file, and the tensor where one is at fault.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            header, start = _read_header(f.read(8), f, size, path)
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read ({e.strerror or e}): download it again") from None
    header.pop("__metadata__", None)
    views: dict[str, np.ndarray] = {}
    end = 0
    for name, (dtype, shape, begin, stop) in sorted(_entries(header, path), key=lambda entry: entry[1][2:]):
        if begin != end:
            raise ModelLoadError(f"{path}: tensor {name!r} starts at byte {begin}, expected {end}: the file is damaged")
        if start + stop > size:
            raise ModelLoadError(f"{path} is cut short inside tensor {name!r}: download it again")
        views[name] = data[start + begin : start + stop].view(np.ndarray).view(dtype).reshape(shape)
        end = stop
    if start + end != size:
        raise ModelLoadError(f"{path} has {size - start - end} bytes that belong to no tensor: the file is damaged")
    return views


def _read_header(prefix: bytes, f: Any, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """(the parsed header, where the data starts)."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
        pointer = prefix.startswith(b"version ")  # what git leaves in place of a large file
        hint = "fetch it with git lfs pull" if pointer else "download it again"
        raise ModelLoadError(f"{path} is no safetensors file ({size} bytes, header of {length}): {hint}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names if len(set(names)) < len(names) else ():
            if names.count(name) > 1:
                raise ModelLoadError(f"{path}: {name!r} appears twice in the header: the file is damaged")
        return dict(pairs)

    try:
        header = json.loads(f.read(length), object_pairs_hook=unique)
    except ModelLoadError:
        raise
    except (ValueError, RecursionError) as e:
        raise ModelLoadError(f"{path}: the safetensors header is not valid JSON ({e}): download it again") from None
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path}: the safetensors header is no JSON object: download it again")
    return header, 8 + length


def _entries(header: dict[str, Any], path: Path) -> list[tuple[str, tuple[np.dtype, tuple[int, ...], int, int]]]:
    """(name, (dtype, shape, first byte, byte after the last)) of each tensor."""
    out = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, stop)) or not isinstance(dtype, str):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ModelLoadError(
                f"{path}: tensor {name!r} has a damaged header entry {entry!r}: download it again"
            ) from None
        if dtype not in _DTYPES:
            raise ModelLoadError(
                f"{path}: tensor {name!r} is stored as {dtype}: quantised checkpoints are not supported, "
                f"serve the original ({', '.join(_DTYPES)})"
            )
        if stop - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ModelLoadError(
                f"{path}: tensor {name!r} of {dtype} {shape} cannot be {stop - begin} bytes: the file is damaged"
            )
        out.append((name, (_DTYPES[dtype], shape, begin, stop)))
    return out
