"""Hugging Face safetensors -> device arrays, and random weights in their place.

A tensor goes from the mapped file to the device as it is stored; transposing, joining and casting happen there, so
the host holds no copy of the model and the device never two.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from ..errors import ModelLoadError
from .fields import read_json
from .safetensors_file import read_safetensors

ParamPath = tuple[str | int, ...]

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IN_FLIGHT = 1 << 29  # bytes of parameters that may be under way to the device, each with its stored form beside it


@dataclass(frozen=True)
class HFSource:
    """How one parameter is made of a checkpoint's tensors.

    names: tensors joined along axis 0, each [out, in] or [n]. shape: of the parameter in our layout.
    transpose: our layout is [in, out]. rows: axis-0 size of each name (may be left out for a single one).
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool = False
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.rows and len(self.names) == 1:
            object.__setattr__(self, "rows", self.hf_shape[:1])
        if len(self.rows) != len(self.names) or sum(self.rows) != self.hf_shape[0]:
            raise ValueError(f"rows {self.rows} of {self.names} do not add up to {self.hf_shape[0]}")

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Of the joined tensors, before transposing."""
        return self.shape[::-1] if self.transpose else self.shape


@dataclass(frozen=True)
class Checkpoint:
    """A folder's tensors as read-only views of its mapped files, by name. `file_of` says which file holds a tensor."""

    path: Path
    tensors: dict[str, np.ndarray]
    file_of: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Maps model.safetensors, or the shards of model.safetensors.index.json; reads headers only.

        Raises: ModelLoadError naming the file or tensor: missing, damaged, not in the index, twice, quantised.
        """
        index = path / "model.safetensors.index.json"
        if (path / "model.safetensors").exists():  # transformers' order: a single file wins over an index
            weight_map, files = None, ["model.safetensors"]
        elif index.exists():
            weight_map = _weight_map(index)
            files = sorted(set(weight_map.values()))
        else:
            raise ModelLoadError(
                f"{path} has no model.safetensors and no model.safetensors.index.json: give a complete checkpoint; "
                "convert pickles (.bin, .pth) with save_pretrained(safe_serialization=True)"
            )
        tensors: dict[str, np.ndarray] = {}
        file_of: dict[str, str] = {}
        for file in files:
            if not (path / file).exists():
                raise ModelLoadError(f"{index} names {file}, which does not exist: download the missing shard")
            for name, view in read_safetensors(path / file).items():
                if name in tensors:
                    raise ModelLoadError(f"{path}: tensor {name!r} is in both {file_of[name]} and {file}: remove one")
                tensors[name], file_of[name] = view, file
        if weight_map is not None:
            _check_index(index, weight_map, file_of)
        return cls(path, tensors, file_of)

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype of most of the bytes."""
        count: Counter[np.dtype] = Counter()
        for view in self.tensors.values():
            count[view.dtype] += view.nbytes
        return count.most_common(1)[0][0] if count else np.dtype(np.float32)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map: download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{index}: weight_map[{name!r}] must be the name of a file beside it, got {file!r}")
    return weight_map


def _check_index(index: Path, weight_map: dict[str, str], file_of: dict[str, str]) -> None:
    for name, file in weight_map.items():
        if file_of.get(name) != file:
            there = f"it is in {file_of[name]}" if name in file_of else "no shard has it"
            raise ModelLoadError(f"{index} says that {name!r} is in {file}, but {there}: download the checkpoint again")
    if unlisted := [name for name in file_of if name not in weight_map]:
        raise ModelLoadError(
            f"{index} does not list {_some(unlisted)}, found in {file_of[unlisted[0]]}: download the checkpoint again"
        )


def load_params(
    checkpoint: Checkpoint, plan: Mapping[ParamPath, HFSource], *, dtype: jnp.dtype, sharding: Sharding, progress: bool
) -> dict[ParamPath, jax.Array]:
    """Device arrays of `dtype` and `sharding` for every parameter of the plan, each cast once from its stored dtype.

    Host memory stays at one tensor, device memory at the model plus about 1 GiB. progress: a bar of stored bytes.
    Raises: ModelLoadError naming missing tensors, extra ones, or one of a wrong shape, before anything is loaded.
    """
    tensors = _usable(checkpoint, plan)
    params: dict[ParamPath, jax.Array] = {}
    under_way: deque[jax.Array] = deque()
    total = sum(tensors[name].nbytes for source in plan.values() for name in source.names)
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for path, source in plan.items():
            views = [tensors[name] for name in source.names]
            params[path] = _to_device(views, source.transpose, np.dtype(dtype), sharding)
            under_way.append(params[path])
            # dispatch runs ahead of the device: without a limit, the stored forms of all tensors could pile up there
            while sum(p.nbytes for p in under_way) > _IN_FLIGHT:
                under_way.popleft().block_until_ready()
            bar.update(sum(view.nbytes for view in views))
        jax.block_until_ready(list(under_way))
    return params


def _to_device(views: list[np.ndarray], transpose: bool, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    # float64 would be narrowed to float32 on its way to the device: cast it here
    views = [view.astype(dtype) if view.dtype == np.float64 else view for view in views]
    return _combine(transpose, dtype, sharding)([jax.device_put(view, sharding) for view in views])


@functools.cache
def _combine(transpose: bool, dtype: np.dtype, sharding: Sharding):
    """Compiled once for each set of shapes, whatever the number of layers."""

    def combine(parts: list[jax.Array]) -> jax.Array:
        # a copy even where nothing changes: on the CPU device_put may hand out the mapped file itself (may_alias=False
        # does not prevent it), and the file may be replaced while the weights live
        parts = [jnp.copy(part).astype(dtype) for part in parts]
        joined = jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]
        return joined.T if transpose else joined

    return jax.jit(combine, out_shardings=sharding)


def _usable(checkpoint: Checkpoint, plan: Mapping[ParamPath, HFSource]) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by the plan's names. Raises: ModelLoadError where they do not fit the plan."""
    tensors = dict(checkpoint.tensors)
    wanted = {name for source in plan.values() for name in source.names}
    if _HEAD in tensors and _HEAD not in wanted:
        _fold_tied_head(checkpoint.path, tensors)
    missing = [name for source in plan.values() for name in source.names if name not in tensors]
    extra = [name for name in tensors if name not in wanted and not name.endswith(".rotary_emb.inv_freq")]
    if missing:
        hint = f"; tensors it does not expect: {_some(extra)}" if extra else ""
        raise ModelLoadError(
            f"{checkpoint.path} lacks {len(missing)} tensors that config.json asks for: {_some(missing)}{hint}: "
            "check that config.json belongs to these weights and that no shard is missing"
        )
    if extra:
        peft = any(".lora_" in name or ".base_layer." in name for name in extra)
        what = "merge the adapter into the base first" if peft else "check that config.json belongs to these weights"
        raise ModelLoadError(
            f"{checkpoint.path} has {len(extra)} tensors that config.json does not ask for: {_some(extra)}: {what}"
        )
    for source in plan.values():
        _check_shapes(checkpoint.path, source, tensors)
    return tensors


def _fold_tied_head(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A tied checkpoint may hold the shared matrix under either name, or under both."""
    head, embed = tensors.pop(_HEAD), tensors.get(_EMBED)
    if embed is None:
        tensors[_EMBED] = head
    elif not _same_bytes(head, embed):
        raise ModelLoadError(
            f"{path}: {_HEAD} differs from {_EMBED}, but config.json has tie_word_embeddings=true: set it to false"
        )


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat_a, flat_b = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    step = 1 << 24  # the comparison makes one bool a byte
    return all(np.array_equal(flat_a[i : i + step], flat_b[i : i + step]) for i in range(0, flat_a.size, step))


def _check_shapes(path: Path, source: HFSource, tensors: dict[str, np.ndarray]) -> None:
    rest = source.hf_shape[1:]
    for name, rows in zip(source.names, source.rows, strict=True):
        got, expected = tensors[name].shape, (rows, *rest)
        if got != expected:
            raise ModelLoadError(
                f"{path}: {name} has shape {got}, expected {expected}: check that config.json belongs to these weights"
            )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def dummy_params(
    plan: Mapping[ParamPath, HFSource], *, dtype: jnp.dtype, sharding: Sharding, seed: int
) -> dict[ParamPath, jax.Array]:
    """Random parameters made on the device: normal of std 0.02, norm scales 1, biases 0.

    A parameter depends on seed, name, shape and dtype alone.
    """
    params = {}
    for path, source in plan.items():
        name = source.names[0]
        constant = 1.0 if name.endswith("norm.weight") else 0.0 if name.endswith(".bias") else None
        stream = np.uint32(zlib.crc32(f"{seed} {name}".encode()))
        params[path] = _filler(source.shape, constant, np.dtype(dtype), sharding)(stream)
    return params


@functools.cache
def _filler(shape: tuple[int, ...], constant: float | None, dtype: np.dtype, sharding: Sharding):
    """Stream number (uint32) -> parameter; compiled once a shape."""

    def fill(stream: jax.Array) -> jax.Array:
        if constant is not None:
            return jnp.full(shape, constant, dtype)
        return (0.02 * _normal(stream, math.prod(shape))).reshape(shape).astype(dtype)

    return jax.jit(fill, out_shardings=sharding)


def _normal(stream: jax.Array, n: int) -> jax.Array:
    """Standard normal float32 [n] from a hash of the element's index: one fused loop without temporaries.

    jax.random's threefry takes several times as long on a CPU and needs 4 bytes an element beside the result.
    """
    x = jax.lax.iota(jnp.uint32, n) * np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D) + stream  # between the rounds: streams are no shifted copies
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    x ^= x >> 16
    uniform = ((x >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0  # 23 bits, so that it is never 1 exactly
    return math.sqrt(2.0) * jax.lax.erf_inv(uniform)
