"""The names that the API answers to: those of the base model and those of the loaded adapters."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from ..errors import AdapterNotFoundError
from ..lora.files import resolve_adapter_path
from ..request import LoRARequest
from .engine_api import ServedEngine
from .http import HTTPError
from .protocol import LoadLoRARequest, UnloadLoRARequest


class Catalog:
    """root: the folder that adapters may be loaded from at run time; None: they may not."""

    def __init__(self, engine: ServedEngine, names: tuple[str, ...], root: str | None, executor: Executor):
        self.engine, self.names, self.executor = engine, names, executor
        self.root = None if root is None else Path(root).resolve()
        self.created = int(time.time())
        self._changing = asyncio.Lock()  # one load or unload at a time: the check and the change belong together

    def adapters(self) -> dict[str, Any]:
        """Name -> LoadReport."""
        return {report.name: report for report in self.engine.list_loras()}

    def resolve(self, model: str | None) -> tuple[str, LoRARequest | None]:
        """The name to answer under and the adapter, None for the base (also when no model is named).

        Raises: HTTPError 404 listing the names.
        """
        if model is None or model in self.names:
            return model or self.names[0], None
        if model in self.adapters():
            return model, LoRARequest(model)
        raise self.unknown(model)

    def unknown(self, model: str) -> HTTPError:
        known = ", ".join([*self.names, *sorted(self.adapters())])
        return HTTPError(
            404, f"the model {model[:256]!r} does not exist; available: {known}", "model", "model_not_found"
        )

    def cards(self) -> list[dict[str, Any]]:
        base = [self._card(name, root=self.engine.model_name, parent=None) for name in self.names]
        adapters = self.adapters().values()
        return base + [self._card(report.name, root=str(report.path), parent=self.names[0]) for report in adapters]

    def card(self, model: str) -> dict[str, Any]:
        for card in self.cards():
            if card["id"] == model:
                return card
        raise self.unknown(model)

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "lora_jax",
            "root": root,
            "parent": parent,
            "max_model_len": self.engine.max_model_len if parent is None else None,
        }

    async def load(self, body: LoadLoRARequest) -> Any:
        """Returns the LoadReport. Serving goes on meanwhile.

        Raises: HTTPError, AdapterError or AdapterCapacityError; then nothing has changed.
        """
        root = self._require_root()
        name = body.lora_name
        if not name.isprintable():
            raise HTTPError(400, "lora_name must hold printable characters only", "lora_name")
        if name in self.names:
            raise HTTPError(400, f"{name!r} is the name of the base model: choose another one", "lora_name")
        path = str(resolve_adapter_path(body.lora_path, root))
        async with self._changing:
            if name in self.adapters() and not body.load_inplace:
                text = f"an adapter named {name!r} is already loaded: unload it first, or send load_inplace=true"
                raise HTTPError(400, text, "lora_name")
            return await self._in_thread(lambda: self.engine.load_lora(name, path, replace=bool(body.load_inplace)))

    async def unload(self, body: UnloadLoRARequest) -> None:
        self._require_root()
        async with self._changing:
            known = self.adapters()
            if body.lora_name not in known:
                text = str(AdapterNotFoundError(body.lora_name, list(known)))
                raise HTTPError(404, text, "lora_name", "model_not_found")
            await self._in_thread(lambda: self.engine.unload_lora(body.lora_name))

    def _require_root(self) -> Path:
        if self.root is None:
            text = "adapters cannot be changed: start with --enable-runtime-lora-updating --lora-root DIR to allow it"
            raise HTTPError(404, text)
        return self.root

    async def _in_thread(self, call: Any) -> Any:
        """A client that leaves must not release the lock while the thread still works."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
