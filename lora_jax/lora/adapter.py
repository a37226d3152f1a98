"""A PEFT folder -> the weights to serve, or an error that names what is wrong. Host only: never imports jax."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..errors import AdapterError
from .checks import BaseTensor, check_base_copy, check_pair, check_tying, missing_modules
from .files import (
    SafetensorsReader,
    TensorInfo,
    file_versions,
    read_config_json,
    require_folder,
    resolve_adapter_path,
)
from .names import TargetSpec, TensorPair, map_tensors
from .peft_config import PeftConfig, parse_config

__all__ = [
    "Adapter",
    "LoRAWeights",
    "LoadReport",
    "TargetSpec",
    "for_slots",
    "peek_rank",
    "read_adapter",
    "resolve_adapter_path",
]

_uids = itertools.count(1)


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """LoRA of one module as slots take it: W + b.T @ a (an embedding: rows of W + (b.T @ a).T).

    a: [rank, in_features], b: [rank, out_features] with the scale in it, both in the slots' dtype and read only.
    """

    module: str
    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class LoadReport:
    """What a load did. ranks and scales: by module. applied: modules. ignored: tensors of the file without effect.
    missing: modules that target_modules names and the file lacks. bytes: host memory. notes: casts and the like."""

    name: str
    path: str
    content_hash: str
    rank: int
    ranks: dict[str, int]
    scales: dict[str, float]
    applied: tuple[str, ...]
    ignored: tuple[str, ...]
    missing: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def __str__(self) -> str:
        def span(values: dict[str, Any]) -> str:
            found = sorted(set(values.values()))
            return f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}"

        def listed(what: str, names: tuple[str, ...]) -> list[str]:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            return [f"  {what}: {', '.join(names[:4])}{more}"] if names else []

        head = (
            f"adapter {self.name!r} from {self.path}: {len(self.applied)} modules, rank {span(self.ranks)}, "
            f"scale {span(self.scales)}, {self.bytes / 1e6:.2f} MB, content {self.content_hash[:12]}"
        )
        lines = [head, *listed("ignored", self.ignored), *listed("missing from the file", self.missing)]
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter, compared by identity.

    uid: unique in the process. content_hash: equal for equal tensors and scales, whatever the name or the folder.
    rank: the largest of its modules. modules: by Hugging Face module name.
    """

    uid: int
    name: str
    path: str
    content_hash: str
    rank: int
    modules: dict[str, LoRAWeights]
    report: LoadReport


def for_slots(module: str, a: np.ndarray, b: np.ndarray, scale: float, dtype: DTypeLike) -> LoRAWeights:
    """Of a [rank, in_features] and b [out_features, rank] as a file has them; scale * b is multiplied in float32, rounded once.

    Raises: AdapterError naming the module when a value does not fit `dtype`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        folded = (b.T.astype(np.float32) * np.float32(scale)).astype(dtype, order="C")
        rounded = a.astype(dtype)
    _fits(rounded, f"lora_A of {module}")
    _fits(folded, f"scale * lora_B of {module} (scale {scale:g})")
    rounded.flags.writeable = folded.flags.writeable = False
    return LoRAWeights(module, rounded, folded, scale)


def _fits(values: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(values.astype(np.float32, copy=False)).all():
        raise AdapterError(f"{what} overflows {values.dtype.name}: serve with a wider dtype, or check the adapter")
    return values


def peek_rank(path: str | os.PathLike[str]) -> int:
    """Largest rank of an adapter folder, from its configuration and the header of its weights alone.

    Raises: AdapterError for a folder that read_adapter would refuse for its files or its configuration.
    """
    with _named("adapter", path) as folder:
        parse_config(read_config_json(folder))
        with SafetensorsReader(folder) as reader:
            ranks = [t.shape[0] for t in reader.tensors.values() if _is_a(t)]
        if not ranks:
            raise AdapterError("the weights file holds no lora_A tensor: it is no LoRA adapter")
        return max(ranks)


def _is_a(tensor: TensorInfo) -> bool:
    return (".lora_A" in tensor.name or ".lora_embedding_A" in tensor.name) and len(tensor.shape) == 2


def read_adapter(
    path: str | os.PathLike[str],
    name: str,
    targets: Mapping[str, TargetSpec],
    *,
    max_rank: int,
    tied_embeddings: bool,
    dtype: DTypeLike = np.float32,
    base_tensor: BaseTensor | None = None,
) -> Adapter:
    """Reads and checks a PEFT folder; the configuration comes first, then names and shapes, then the weights.

    targets: the modules of the base, by name. max_rank: largest rank the slots hold. dtype: of the slots; values that
    overflow it are refused. tied_embeddings: lm_head shares the input embedding's weight.
    base_tensor(tensor_name): the base's own weight. With it, copies of base weights in the file are compared, and
    refused where they differ; without it, only those beside LoRA on embed_tokens and lm_head are accepted, unread.

    Raises: AdapterError naming the field or tensor that is broken, unsupported or does not fit this base.
    """
    with _named(f"adapter {name!r}", path) as folder:
        versions = file_versions(folder)
        config = parse_config(read_config_json(folder))
        with SafetensorsReader(folder) as reader:
            files = map_tensors(reader.tensors, targets, velora=config.velora)
            check_tying(config, files.pairs.values(), tied_embeddings)
            for pair in files.pairs.values():
                check_pair(pair, config, reader.tensors, max_rank)
            for tensor, spec in files.base_copies.items():
                check_base_copy(tensor, spec, reader, base_tensor)
            casts: Counter[tuple[str, str]] = Counter()
            pairs, digest = (files.pairs[module] for module in sorted(files.pairs)), hashlib.sha256()
            weights = [_read_module(pair, config, reader, np.dtype(dtype), casts, digest) for pair in pairs]
        if file_versions(folder) != versions:  # old weights under a new scale, say
            raise AdapterError("its files changed while they were read: load it again once they are complete")
    report = LoadReport(
        name=name,
        path=os.fspath(path),
        content_hash=digest.hexdigest(),
        rank=max(w.rank for w in weights),
        ranks={w.module: w.rank for w in weights},
        scales={w.module: w.scale for w in weights},
        applied=tuple(w.module for w in weights),
        ignored=tuple(sorted([*files.base_copies, *files.ignored])),
        missing=missing_modules(config, files, targets),
        bytes=sum(w.a.nbytes + w.b.nbytes for w in weights),
        notes=tuple(f"{count} tensors cast from {old} to {new}" for (old, new), count in sorted(casts.items())),
    )
    modules = {w.module: w for w in weights}
    return Adapter(next(_uids), name, report.path, report.content_hash, report.rank, modules, report)


@contextmanager
def _named(what: str, path: str | os.PathLike[str]) -> Iterator[Path]:
    """The folder, and `what` with the path before every AdapterError about it."""
    try:
        folder = Path(path)
        require_folder(folder)
        yield folder
    except AdapterError as e:
        raise AdapterError(f"{what} from {os.fspath(path)!r}: {e}") from None


def _read_module(
    pair: TensorPair,
    config: PeftConfig,
    reader: SafetensorsReader,
    dtype: np.dtype,
    casts: Counter[tuple[str, str]],
    digest: Any,
) -> LoRAWeights:
    """Both tensors of one module, finite, at most float32, and within the range of the slots' dtype; into the digest go its name
    and scale, and their shapes, dtypes and values as the file has them."""
    name, (a, b) = pair.target.name, (_read_array(reader, tensor, dtype, casts) for tensor in (pair.a, pair.b))
    scale = config.scale(pair.trained_as, len(a))
    for array in (a, b):
        digest.update(f"{name}|{array.dtype.name}|{array.shape}|".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    digest.update(struct.pack("<d", scale))
    return for_slots(name, a, b, scale, dtype)


def _read_array(reader: SafetensorsReader, tensor: str, dtype: np.dtype, casts: Counter[tuple[str, str]]) -> np.ndarray:
    array = reader.read(tensor)
    wide = array if array.dtype == np.float64 else array.astype(np.float32, copy=False)
    if not np.isfinite(wide).all():
        raise AdapterError(
            f"tensor {tensor!r} holds NaN or infinity: the adapter is broken (did its training diverge?)"
        )
    if array.dtype == np.float64:
        casts["float64", "float32"] += 1
        with np.errstate(over="ignore"):
            array = _fits(array.astype(np.float32), f"tensor {tensor!r}")
    if array.dtype != dtype:
        casts[array.dtype.name, dtype.name] += 1
    return array
