"""Options of the server itself; those of the engine are `EngineArgs`. Light: the command line imports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import EngineArgs
from ..errors import ConfigError


def _opt(default: Any, help: str, **meta: Any) -> Any:
    return field(default=default, metadata={"help": help, **meta})


@dataclass(frozen=True)
class ServerArgs:
    """Raises: ConfigError naming the option."""

    host: str = _opt("127.0.0.1", "address to listen on; unlike vLLM only this machine by default (0.0.0.0: every one)")
    port: int = _opt(8000, "port to listen on (0: any free one)")
    served_model_name: tuple[str, ...] = _opt((), "names of the base model in the API (default: the model as given)")
    api_key: str | None = _opt(None, "key that clients must send; /health, /version and /metrics stay open")
    enable_runtime_lora_updating: bool = _opt(False, "offer /v1/load_lora_adapter and /v1/unload_lora_adapter")
    lora_root: str | None = _opt(None, "the folder that adapters loaded at run time must lie in")
    max_open_requests: int = _opt(4096, "prompts in work or waiting; more are answered with status 429")
    shutdown_grace: float = _opt(10.0, "seconds that open requests get to finish after SIGTERM or SIGINT")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = _opt("info", "uvicorn's log")
    disable_uvicorn_access_log: bool = _opt(False, "do not log each HTTP request")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.max_open_requests < 1:
            raise ConfigError(f"max_open_requests must be >= 1, got {self.max_open_requests}")
        if not 0 <= self.shutdown_grace <= 3600:
            raise ConfigError(f"shutdown_grace must be in [0, 3600] seconds, got {self.shutdown_grace}")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key is empty: leave the option out to serve without a key")
        if any(not name for name in self.served_model_name):
            raise ConfigError("served_model_name holds an empty name")
        if self.enable_runtime_lora_updating and self.lora_root is None:
            raise ConfigError(
                "enable_runtime_lora_updating needs lora_root: the folder that adapters may be loaded from"
            )
        if self.lora_root is not None and not self.enable_runtime_lora_updating:
            raise ConfigError("lora_root is used with enable_runtime_lora_updating only")
        if self.lora_root is not None and not Path(self.lora_root).is_dir():
            raise ConfigError(f"lora_root is not a folder: {self.lora_root}")

    def names(self, engine: EngineArgs) -> tuple[str, ...]:
        """The base model's names, checked against those of the adapters that are loaded at start."""
        names = self.served_model_name or (engine.model,)
        adapters = [module.partition("=")[0] for module in engine.lora_modules]
        for name in adapters:
            if name in names:
                raise ConfigError(f"lora_modules: {name!r} is already the name of the base model")
            if adapters.count(name) > 1:
                raise ConfigError(f"lora_modules: the name {name!r} is given twice")
        return names
