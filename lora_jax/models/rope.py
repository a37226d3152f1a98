"""Rotary embeddings: what a checkpoint's configuration says, and the frequencies. Host only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import ModelLoadError
from .fields import Fields

_KINDS = ("default", "linear", "llama3")
_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "attention_factor",
}


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. factor is used by linear and llama3, the last three fields by llama3 alone."""

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


def parse_rope(raw: dict[str, Any], source: str, max_position_embeddings: int) -> RopeConfig:
    """Reads rope_theta with rope_scaling (transformers 4) or rope_parameters (transformers 5) of a config.json.

    Raises: ModelLoadError naming the field, for rope types other than default, linear and llama3 among others.
    """
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        section = raw.get(name)
        if section is not None and not isinstance(section, dict):
            raise ModelLoadError(f"{source}: {name} must be an object, got {section!r}")
        if section:
            found.append(_parse_section(raw, section, source, name, max_position_embeddings))
    if len(found) == 2 and found[0] != found[1]:
        raise ModelLoadError(
            f"{source}: rope_scaling={raw['rope_scaling']!r} and rope_parameters={raw['rope_parameters']!r} disagree: "
            "remove the wrong one"
        )
    return found[0] if found else _parse_section(raw, {}, source, "rope_parameters", max_position_embeddings)


def _parse_section(raw: dict[str, Any], section: dict[str, Any], source: str, name: str, max_pos: int) -> RopeConfig:
    kind = section.get("rope_type", section.get("type", "default"))
    nested = [k for k, v in section.items() if isinstance(v, dict)]
    if nested:
        raise ModelLoadError(f"{source}: {name}.{nested[0]}: a rope per layer type is not supported: use one for all")
    if kind not in _KINDS:
        raise ModelLoadError(
            f"{source}: {name}.rope_type={kind!r} is not supported: serve a checkpoint whose rope is one of "
            f"{', '.join(_KINDS)}"
        )
    unknown = sorted(k for k, v in section.items() if k not in _KNOWN and v is not None)
    if unknown:
        raise ModelLoadError(
            f"{source}: {name}.{unknown[0]}={section[unknown[0]]!r} is not supported for rope_type {kind!r}: remove it "
            "if it has no effect"
        )
    fields = Fields(section, f"{source}: {name}")
    _refuse_partial(raw, fields, source)
    theta = Fields(section if "rope_theta" in section else raw, source).number("rope_theta", 10000.0)
    if kind == "default":
        if section.get("factor", 1) not in (1, None):
            raise fields.error(
                "factor", f"= {section['factor']!r} has no effect without a rope_type: add it or remove factor"
            )
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, fields.number("factor"))
    return _llama3(raw, fields, source, theta, max_pos)


def _refuse_partial(raw: dict[str, Any], fields: Fields, source: str) -> None:
    for holder, where in ((raw, source), (fields.raw, fields.source)):
        for name in ("partial_rotary_factor", "attention_factor"):
            value = holder.get(name)
            if value is not None and value != 1:
                raise ModelLoadError(f"{where}: {name}={value!r} is not supported: only 1 is")


def _llama3(raw: dict[str, Any], fields: Fields, source: str, theta: float, max_pos: int) -> RopeConfig:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.error("high_freq_factor", f"must be larger than low_freq_factor={low:g}, got {high:g}")
    # transformers' order: the top-level field, then the section's, then the model's own length
    holder = Fields(raw, source) if "original_max_position_embeddings" in raw else fields
    original = holder.integer("original_max_position_embeddings", max_pos)
    return RopeConfig("llama3", theta, fields.number("factor"), low, high, original)


def inv_freq(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position of each pair of dimensions: float32 [head_dim // 2].

    Rounds where transformers does (exponent, power and reciprocal in float32), so that long positions get its angles.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = (np.float64(rope.theta) ** exponent.astype(np.float64)).astype(np.float32)
    freq = np.float32(1) / power
    if rope.kind == "linear":
        return freq / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3_freq(rope, freq)
    return freq


def _llama3_freq(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """Long waves are slowed down by factor, short ones kept, those between are blended."""
    turns = rope.original_max_position_embeddings * freq.astype(np.float64) / (2 * np.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * freq / rope.factor + blend * freq).astype(np.float32)
