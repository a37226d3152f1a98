"""HTTP matters that know nothing of models: errors in OpenAI's form, request bodies, API keys."""

from __future__ import annotations

import hmac
import json
import logging
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import (
    AdapterCapacityError,
    AdapterError,
    AdapterNotFoundError,
    ConfigError,
    EngineDeadError,
    LoraJaxError,
    RequestError,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
OPEN_PATHS = ("/health", "/version", "/metrics")  # readable without an API key
ModelT = TypeVar("ModelT", bound=BaseModel)


class HTTPError(Exception):
    """An error that already knows its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        self.status, self.param, self.code = status, param, code
        super().__init__(message)


def dumps(content: Any) -> str:
    """JSON in ASCII: no line separator can break a stream of events, no lone surrogate can fail to encode."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


def describe(exc: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and body, in OpenAI's form, of an exception; chosen by its class alone."""
    param: str | None = None
    code: str | None = None
    match exc:
        case HTTPError():
            status, param, code = exc.status, exc.param, exc.code
        case RequestError():
            status, param = 400, exc.param
        case AdapterNotFoundError():
            status, param, code = 404, "model", "model_not_found"
        case AdapterCapacityError():
            status = 409
        case AdapterError() | ConfigError():
            status = 400
        case EngineDeadError():
            status, code = 503, "engine_unavailable"
        case _:
            status = 500
    message = (
        str(exc) if isinstance(exc, (HTTPError, LoraJaxError)) else "the server failed on this request; see its log"
    )
    return status, error_body(status, message, param, code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(exc: BaseException) -> Response:
    status, body = describe(exc)
    if status == 500:
        log.error("a request failed", exc_info=exc)
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Every error a client can meet comes in OpenAI's form."""

    async def known(request: Request, exc: Exception) -> Response:
        return error_response(exc)

    async def http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        message = f"{request.method} {request.url.path}: {exc.detail}"
        return JSONResponse(error_body(exc.status_code, message), status_code=exc.status_code, headers=exc.headers)

    async def invalid(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        message, param = explain(exc.errors(), skip=1)
        return JSONResponse(error_body(400, message, param), status_code=400)

    async def gone(request: Request, exc: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_middleware(LastResort)
    for kind in (LoraJaxError, HTTPError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, gone)


def explain(errors: Any, skip: int = 0) -> tuple[str, str | None]:
    """(message, field) of pydantic's first error. The input is not quoted: it may be long."""
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return str(cause), cause.param
    path = ".".join(str(part) for part in first["loc"][skip:])
    text = str(first["msg"]).removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path}: {text}{more}" if path else f"{text}{more}", (path.partition(".")[0] or None)


async def read_body(request: Request, model: type[ModelT]) -> ModelT:
    """The request's JSON body as `model`.

    FastAPI's own body parameter reads a body of any size into memory and takes NaN for a number, hence this one.

    Raises: HTTPError 400, 413 or 415.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise HTTPError(415, f"content-type must be application/json, got {media or 'none'}")
    data = _parse(await _read(request))
    if not isinstance(data, dict):
        raise HTTPError(400, f"the body must be a JSON object, got {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        message, param = explain(exc.errors(include_url=False, include_input=False))
        raise HTTPError(400, message, param) from None


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


def _parse(body: bytes) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not valid JSON")

    try:
        data = json.loads(body.decode("utf-8"), parse_constant=refuse)
        if b"\\ud" in body.lower():  # half of a surrogate pair alone is no character, and fails far from here
            json.dumps(data, ensure_ascii=False).encode("utf-8")
        return data
    except RecursionError:
        raise HTTPError(400, "the body is not valid JSON: nested too deeply") from None
    except UnicodeError:
        raise HTTPError(400, "the body is not valid JSON: it holds bytes or escapes that are no Unicode text") from None
    except ValueError as exc:  # also integers of too many digits
        raise HTTPError(400, f"the body is not valid JSON: {str(exc)[:200]}") from None


class LastResort:
    """Answers 500 for what nobody handles. (Starlette's own handler of Exception raises it again after answering, which
    costs the client its connection and logs it twice.)"""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as exc:
            if scope["type"] != "http" or started:
                raise
            await error_response(exc)(scope, receive, send)


class RequireKey:
    """Refuses HTTP requests that lack `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                error = HTTPError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)
