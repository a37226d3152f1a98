"""Serve many LoRA adapters on one base model with JAX.

The public names are imported on first use, so that `import lora_jax` costs nothing and brings in no other package.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineArgs
    from .dispatch import StepTable
    from .errors import (
        AdapterCapacityError,
        AdapterError,
        AdapterNotFoundError,
        CapacityError,
        ConfigError,
        EngineDeadError,
        LoraJaxError,
        ModelLoadError,
        RequestError,
        StepKeyError,
    )
    from .llm import LLM
    from .request import CompletionOutput, Logprob, LoRARequest, RequestOutput, SamplingParams, TokensPrompt
    from .step_keys import StepKey

__version__ = "0.1.0"

_here = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_here, "kernels")):
    # A checkout that is not installed: `kernels` lies beside this folder there, and inside it once installed.
    __path__.append(os.path.dirname(_here))

__all__ = [
    "LLM",
    "AdapterCapacityError",
    "AdapterError",
    "AdapterNotFoundError",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineDeadError",
    "LoRARequest",
    "Logprob",
    "LoraJaxError",
    "ModelLoadError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepKey",
    "StepKeyError",
    "StepTable",
    "TokensPrompt",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "EngineArgs": "config",
    "StepKey": "step_keys",
    "StepTable": "dispatch",
    **dict.fromkeys(
        ("CompletionOutput", "Logprob", "LoRARequest", "RequestOutput", "SamplingParams", "TokensPrompt"), "request"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
