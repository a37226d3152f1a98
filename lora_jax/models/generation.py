"""generation_config.json: end tokens and the sampling defaults that a model's authors recommend. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError, RequestError
from ..request import SamplingParams
from .fields import read_json

# Name in the file -> name in SamplingParams; these are the ones that vLLM's generation_config="auto" takes.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint recommends where a request says nothing; None: the file does not say.

    eos_token_ids: every id that ends a text. do_sample is only reported: as in vLLM, the sampling values count
    whatever it says.
    """

    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def as_sampling_overrides(self) -> dict[str, Any]:
        """The sampling values that the file sets, as keyword arguments of SamplingParams."""
        values = {name: getattr(self, name) for name in _SAMPLING.values()}
        return {name: value for name, value in values.items() if value is not None}


def load_generation_defaults(folder: Path, raw_config: dict[str, Any]) -> GenerationDefaults:
    """Reads folder/generation_config.json; end and begin tokens fall back on `raw_config` (config.json's fields).

    Raises: ModelLoadError naming the file and the value that SamplingParams would refuse.
    """
    path = folder / "generation_config.json"
    raw, source = (read_json(path), str(path)) if path.exists() else ({}, str(folder / "config.json"))
    return parse_generation_defaults(raw, raw_config, source)


def parse_generation_defaults(raw: dict[str, Any], raw_config: dict[str, Any], source: str) -> GenerationDefaults:
    """As `load_generation_defaults`, from fields already read; `source` names them in errors."""
    values = {ours: raw[name] for name, ours in _SAMPLING.items() if raw.get(name) is not None}
    try:
        SamplingParams(**values)
    except RequestError as e:
        raise ModelLoadError(f"{source}: {e}: correct the file") from None
    if not isinstance(do_sample := raw.get("do_sample"), bool | None):
        raise ModelLoadError(f"{source}: do_sample must be true or false, got {do_sample!r}")
    eos = _token_ids("eos_token_id", raw, source) or _token_ids("eos_token_id", raw_config, source)
    bos = _token_ids("bos_token_id", raw, source) or _token_ids("bos_token_id", raw_config, source)
    return GenerationDefaults(frozenset(eos), bos[0] if bos else None, do_sample, **values)


def _token_ids(name: str, raw: dict[str, Any], source: str) -> list[int]:
    """The ids of a field that holds one, a list, or nothing."""
    value = raw.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ModelLoadError(f"{source}: {name} must be a token id or a list of them, got {value!r}")
    return [token for token in ids if token >= 0]  # -1 stands for none in some old files
