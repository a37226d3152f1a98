"""Adapters by name: loaded when somebody says so, or when a request brings a folder. Host only: never imports jax."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from .errors import AdapterError, AdapterNotFoundError, RequestError
from .lora.adapter import Adapter, LoadReport
from .lora.slots import SlotManager
from .request import LoRARequest


class AdapterLoader:
    """slots: None where no adapters are served. read(name, path): an adapter for this engine. From any thread."""

    def __init__(self, slots: SlotManager | None, read: Callable[[str, str], Adapter]):
        self._slots, self._read_for = slots, read
        self._loading = threading.Lock()  # of adapters that requests bring: the first one loads, others wait

    def slots_for(self, name: str) -> SlotManager:
        """Where an adapter of that name might be. Raises AdapterNotFoundError where there are none."""
        if self._slots is None:
            raise AdapterNotFoundError(name, [])
        return self._slots

    def load(self, name: str, path: str, *, replace: bool = False) -> LoadReport:
        """See `Engine.load_lora`."""
        if self._slots is None:
            raise AdapterError(f"adapter {name!r} cannot be loaded: the engine was started without enable_lora")
        adapter = self._read(name, path)
        self._slots.register(adapter, replace=replace)
        return adapter.report

    def _read(self, name: str, path: str) -> Adapter:
        if not isinstance(name, str) or not name:
            raise AdapterError(f"an adapter's name must be a non-empty string, got {name!r}")
        if not isinstance(path, str | os.PathLike):
            raise AdapterError(f"the path of adapter {name!r} must be a string, got {path!r}")
        return self._read_for(name, os.fspath(path))

    def adapter_of(self, wanted: LoRARequest | None) -> Adapter | None:
        """What a request asks for, None: the base. Loads it first if it is not loaded and the request has a path.
        Raises: RequestError, AdapterError, AdapterNotFoundError."""
        if wanted is None:
            return None
        if self._slots is None:
            raise RequestError(
                f"adapter {wanted.lora_name!r} is asked for, but the engine was started without enable_lora",
                param="lora_request",
            )
        try:
            adapter = self._slots.get(wanted.lora_name)
        except AdapterNotFoundError:
            if wanted.lora_path is None:
                raise
            adapter = self._first_use(self._slots, wanted.lora_name, wanted.lora_path)
        if wanted.lora_path is not None and os.path.realpath(wanted.lora_path) != os.path.realpath(adapter.path):
            raise AdapterError(
                f"adapter {wanted.lora_name!r} is loaded from {adapter.path}, the request names {wanted.lora_path}: "
                "unload it first, or load_lora(..., replace=True)"
            )
        return adapter

    def _first_use(self, slots: SlotManager, name: str, path: str) -> Adapter:
        """The adapter of that name, loaded unless another thread has been quicker."""
        with self._loading:
            with contextlib.suppress(AdapterNotFoundError):
                return slots.get(name)
            adapter = self._read(name, path)
            try:
                slots.register(adapter)
            except AdapterError:  # `load` may have been quicker meanwhile
                with contextlib.suppress(AdapterNotFoundError):
                    return slots.get(name)
                raise
            return adapter
