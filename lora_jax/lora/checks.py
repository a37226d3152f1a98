"""Does an adapter file fit its configuration, this base and the slots? Host only: never imports jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ..errors import AdapterError
from .files import FLOAT_DTYPES, SafetensorsReader, TensorInfo
from .names import FileMap, TargetSpec, TensorPair, core_name
from .peft_config import PeftConfig

BaseTensor = Callable[[str], np.ndarray]


def check_pair(pair: TensorPair, config: PeftConfig, tensors: Mapping[str, TensorInfo], max_rank: int) -> None:
    """Raises AdapterError unless one module's dtypes, shapes and rank fit base, configuration and slots."""
    a, b, spec = tensors[pair.a], tensors[pair.b], pair.target
    for t in (a, b):
        if t.dtype not in FLOAT_DTYPES:
            dtypes = ", ".join(FLOAT_DTYPES)
            raise AdapterError(f"tensor {t.name!r} has dtype {t.dtype}: LoRA weights must be one of {dtypes}")
    _check_shapes(a, b, spec)
    rank = a.shape[0]
    if rank not in config.ranks(pair.trained_as):
        announced = " or ".join(map(str, config.ranks(pair.trained_as)))
        raise AdapterError(
            f"r disagrees: adapter_config.json (r, rank_pattern) gives {spec.name} rank {announced}, but tensor {a.name!r} "
            f"has rank {rank}, so the scale is in doubt"
        )
    if rank > max_rank:
        raise AdapterError(
            f"tensor {a.name!r} has rank {rank}, more than max_lora_rank={max_rank}: raise max_lora_rank"
        )
    names = {pair.trained_as, spec.name}
    if any(rank not in config.ranks(n) for n in names) or len({config.scale(n, rank) for n in names}) > 1:
        raise AdapterError(
            f"rank_pattern or alpha_pattern give {spec.name} another rank or scale under its name in the file, "
            f"{pair.trained_as}: which one counts is in doubt"
        )
    if not any(is_targeted(config, n, spec) for n in names | {core_name(spec.name)}):
        raise AdapterError(
            f"tensor {a.name!r} belongs to a module that the configuration leaves out (target_modules, exclude_modules "
            "or layers_to_transform): whether it should apply is in doubt"
        )


def is_targeted(config: PeftConfig, name: str, spec: TargetSpec) -> bool:
    """Whether PEFT would adapt `spec` if it were called `name`."""
    return config.targets(name, all_linear_holds=spec.kind == "linear" and spec.group != "lm_head")


def _check_shapes(a: TensorInfo, b: TensorInfo, spec: TargetSpec) -> None:
    """a [r, in], b [out, r] with one r >= 1; says which of the two is wrong, and how."""
    for t, want in ((a, ("r", spec.in_features)), (b, (spec.out_features, "r"))):
        axis = want.index("r")
        matrix = len(t.shape) == 2
        if matrix and t.shape[1 - axis] == want[1 - axis] and t.shape[axis] > 0:
            continue
        transposed = matrix and t.shape[axis] == want[1 - axis]
        why = "it is transposed" if transposed else f"the adapter was made for another base (see {spec.name})"
        raise AdapterError(f"tensor {t.name!r} has shape {list(t.shape)}, expected [{want[0]}, {want[1]}]: {why}")
    if a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"tensors {a.name!r} and {b.name!r} must have one rank, got {a.shape[0]} and {b.shape[1]}: the file is broken"
        )


def check_tying(config: PeftConfig, pairs: Iterable[TensorPair], tied_embeddings: bool) -> None:
    """Raises AdapterError when PEFT tied this adapter's LoRA of the input embedding to that of lm_head."""
    sides = [p.target.name for p in pairs if p.target.group in ("embed", "lm_head")]
    if config.ensure_weight_tying and tied_embeddings and sides:
        raise AdapterError(f"ensure_weight_tying is not supported with LoRA on {', '.join(sides)} of a tied base")


def check_base_copy(name: str, spec: TargetSpec, reader: SafetensorsReader, base_tensor: BaseTensor | None) -> None:
    """Accepts a copy of a base weight that changes nothing: PEFT would load it over the base.

    Raises: AdapterError when the tensor's shape or values differ from the base's, or when that cannot be told.
    """
    info = reader.tensors[name]
    shape = (spec.in_features, spec.out_features) if spec.kind == "embedding" else (spec.out_features, spec.in_features)
    if info.shape != shape:
        raise AdapterError(
            f"tensor {name!r} has shape {list(info.shape)}, the base's weight has {list(shape)}: the adapter was "
            "trained on another base or a resized vocabulary"
        )
    if base_tensor is None:
        if not name.endswith(".base_layer.weight") or spec.group not in ("embed", "lm_head"):
            raise AdapterError(
                f"tensor {name!r} replaces a weight of the base (modules_to_save), which is not supported"
            )
        return
    if info.dtype not in FLOAT_DTYPES:
        raise AdapterError(f"tensor {name!r} has dtype {info.dtype}: it cannot be compared with the base's weight")
    if not _same_up_to_rounding(base_tensor(f"{spec.name}.weight"), reader.read(name)):
        raise AdapterError(
            f"tensor {name!r} differs from the base's weight: replacing weights (modules_to_save) is not supported"
        )


def _same_up_to_rounding(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether one is the other, perhaps rounded to its own dtype."""
    with np.errstate(over="ignore"):
        return np.array_equal(x.astype(y.dtype), y) or np.array_equal(x, y.astype(x.dtype))


def missing_modules(config: PeftConfig, files: FileMap, targets: Mapping[str, TargetSpec]) -> tuple[str, ...]:
    """Modules of the base that the configuration names and the file lacks."""
    if config.target_modules is None and not config.all_linear:
        return ()  # PEFT then chooses modules by architecture: which ones were meant is unknown
    return tuple(s.name for s in targets.values() if s.name not in files.pairs and is_targeted(config, s.name, s))
