"""Typed reading of JSON files whose fields somebody else wrote. Host only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError

_REQUIRED: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises: ModelLoadError naming the file when it is missing, broken, or no object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist: give a complete Hugging Face checkpoint folder") from None
    except OSError as e:
        raise ModelLoadError(f"{path} cannot be read: {e.strerror or e}") from None
    except ValueError as e:
        raise ModelLoadError(f"{path} is not valid JSON ({e}): download it again") from None
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


class Fields:
    """One JSON object and the name of its source. Every getter raises ModelLoadError naming source, field and value.

    A field that is absent gives `default`, or is an error when there is none. null counts as a value of its own:
    it is accepted only where `null` says what it stands for.
    """

    def __init__(self, raw: dict[str, Any], source: str):
        self.raw, self.source = raw, source

    def error(self, name: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {name} {problem}")

    def _get(self, name: str, default: Any, null: Any, want: str) -> tuple[bool, Any]:
        """(is it final, value): defaults and what null stands for need no further check."""
        if name not in self.raw:
            if default is _REQUIRED:
                raise self.error(name, f"is missing: add it ({want})")
            return True, default
        value = self.raw[name]
        if value is None and null is not _REQUIRED:
            return True, null
        return False, value

    def integer(self, name: str, default: Any = _REQUIRED, *, null: Any = _REQUIRED, low: int = 1) -> Any:
        final, value = self._get(name, default, null, f"an integer >= {low}")
        if not final and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise self.error(name, f"must be an integer >= {low}, got {value!r}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, null: Any = _REQUIRED, above: float = 0.0) -> Any:
        final, value = self._get(name, default, null, f"a number > {above:g}")
        if final:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
            raise self.error(name, f"must be a number > {above:g}, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        final, value = self._get(name, default, default, "true or false")
        if not final and not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value
