"""The routes. What they do lies in `completions`, `chat` and `catalog`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .. import __version__
from ..errors import RequestError
from .catalog import Catalog
from .chat import Chat
from .completions import Completion
from .engine_api import ServedEngine
from .http import JSONResponse, RequireKey, install_error_handlers, read_body
from .metrics import Metrics
from .options import ServerArgs
from .prompts import chat_token_ids
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoRARequest,
    TokenizeRequest,
    UnloadLoRARequest,
)
from .serving import Serving
from .streams import EventStream, until_disconnect
from .worker import EngineWorker

BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, LoadLoRARequest, UnloadLoRARequest)


def create_app(
    engine: ServedEngine, args: ServerArgs, names: tuple[str, ...], worker: EngineWorker | None = None
) -> FastAPI:
    """The ASGI application; its lifespan starts and stops `worker` (one of its own by default).

    names: those of the base model, at least one.
    """
    worker = worker or EngineWorker(engine)
    executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="lora-jax-http")
    catalog = Catalog(engine, names, args.lora_root if args.enable_runtime_lora_updating else None, executor)
    serving = Serving(engine, worker, catalog, Metrics(engine), executor, args.max_open_requests)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.stop()
        executor.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="lora_jax", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = serving
    install_error_handlers(app)
    _add_state_routes(app, serving)
    _add_generation_routes(app, serving)
    _add_token_routes(app, serving)
    _add_adapter_routes(app, serving)
    if args.api_key is not None:
        app.add_middleware(RequireKey, key=args.api_key)
    _describe_bodies(app)
    return app


def _add_state_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/health")
    async def health() -> Response:
        serving.worker.check_open()
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(serving.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> Response:
        """The engine's counters and its dispatch table, one entry an executable."""
        rows = await serving.in_thread(serving.engine.step_table.report)
        return JSONResponse({**serving.engine.stats(), "step_table": [{**r, "key": str(r["key"])} for r in rows]})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": serving.catalog.cards()})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        return JSONResponse(serving.catalog.card(model))


def _add_generation_routes(app: FastAPI, serving: Serving) -> None:
    async def answer(call: Completion | Chat, request: Request) -> Response:
        async def work() -> Response:
            await call.prepare()
            return EventStream(call.chunks()) if call.body.stream else JSONResponse(await call.full())

        response = await until_disconnect(request.receive, work())
        return response or Response(status_code=499)  # nobody is left to read it

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        return await answer(Completion(serving, body), request)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        return await answer(Chat(serving, body), request)


def _add_token_routes(app: FastAPI, serving: Serving) -> None:
    def tokenizer(model: str | None) -> Any:
        serving.catalog.resolve(model)
        if serving.engine.tokenizer is None:
            raise RequestError("this model has no tokenizer", "model")
        return serving.engine.tokenizer

    @app.post("/tokenize", openapi_extra=_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        tok = tokenizer(body.model)

        def encode() -> list[int]:
            if body.messages is None:
                return tok.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
            return chat_token_ids(
                tok, body.messages, body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
            )

        def work() -> Response:
            ids = encode()
            strings = [tok.decode([t], skip_special_tokens=False) for t in ids] if body.return_token_strs else None
            limit = serving.engine.max_model_len
            return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

        return await serving.in_thread(work)

    @app.post("/detokenize", openapi_extra=_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        tok = tokenizer(body.model)
        if any(t < 0 for t in body.tokens):
            raise RequestError("tokens must not be negative", "tokens")
        text = await serving.in_thread(lambda: tok.decode(body.tokens, skip_special_tokens=False))
        return JSONResponse({"prompt": text})


def _add_adapter_routes(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/load_lora_adapter", openapi_extra=_body(LoadLoRARequest))
    async def load(request: Request) -> Response:
        body = await read_body(request, LoadLoRARequest)
        await serving.catalog.load(body)
        serving.worker.wake()
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=_body(UnloadLoRARequest))
    async def unload(request: Request) -> Response:
        body = await read_body(request, UnloadLoRARequest)
        await serving.catalog.unload(body)
        serving.metrics.forget(body.lora_name)
        serving.worker.wake()
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _body(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI) -> None:
    """The bodies are read by our own dependency, so FastAPI must be told of their schemas."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            pairs = [(model, "validation") for model in BODIES]
            _, found = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            schema.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]
