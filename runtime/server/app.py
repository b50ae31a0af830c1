"""The application: vLLM 0.33's routes over an engine, for any ASGI server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import trt_lora
from trt_lora.runtime.engine import Engine
from trt_lora.runtime.server.answering import Answering
from trt_lora.runtime.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadBody,
    TokenizeBody,
    UnloadBody,
    decoded,
)
from trt_lora.runtime.server.bridge import EngineBridge
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.guard import Guard, GuardConfig
from trt_lora.runtime.server.served_models import ServedModels, load_at_start
from trt_lora.runtime.server.tokenizing import detokenized, tokenized
from trt_lora.runtime.serving.serving_config import ServingConfig

_ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
Handler = Callable[["Server", Request], Awaitable[Response]]


@dataclass(frozen=True)
class ServerConfig:
    """What a server serves, and to whom."""

    names: Sequence[str]  # of the base model; the first is the adapters' parent
    lora_roots: Sequence[Path] = ()  # folders below which adapters may lie
    lora_modules: Sequence[tuple[str, str]] = ()  # name and path, loaded at the start
    allows_updates: bool = False  # routes that load and unload adapters exist
    forces_usage: bool = False  # every stream tells how many tokens there were
    guard: GuardConfig = field(default_factory=GuardConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)


def application(engine: Engine, config: ServerConfig) -> ASGIApp:
    """Return the ASGI application of an engine that is open while it runs."""
    server = Server(engine, config)
    starlette = Starlette(
        routes=server.routes(),
        lifespan=server.lifespan,
        exception_handlers={HttpError: _refused, 404: _no_route, 405: _no_route},
    )
    return Guard(starlette, config.guard)


class Server:
    """The handlers of the routes."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        """Take what is served."""
        self._engine, self._config = engine, config
        self._models = ServedModels(engine, config.names, config.lora_roots)
        self._answering: Answering | None = None  # while it runs

    def routes(self) -> list[Route]:
        """Return the routes; those that change adapters only where that is allowed."""
        routes = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/v1/models", self._list),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/invocations", self._invoke, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]
        if self._config.allows_updates:
            routes += [
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/adapters", self._add, methods=["POST"]),
                Route("/adapters/{name:path}", self._remove, methods=["DELETE"]),
            ]
        return routes

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Load the first adapters, and run the engine's loop while the server runs."""
        del app
        await load_at_start(self._models, self._config.lora_modules)
        bridge = EngineBridge(self._engine.serve(self._config.serving))
        self._answering = Answering(self._engine, bridge, self._models, self._config.forces_usage)
        try:
            yield
        finally:
            self._answering = None
            await asyncio.to_thread(bridge.engine.close)

    async def _health(self, request: Request) -> Response:
        del request
        return Response(status_code=200 if self._answering is not None else 503)

    async def _version(self, request: Request) -> Response:
        del request
        return JSONResponse({"version": trt_lora.__version__})

    async def _list(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": self._models.cards()})

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, decoded(await _body(request), CompletionBody))

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, decoded(await _body(request), ChatBody))

    async def _invoke(self, request: Request) -> Response:
        raw = await _body(request)
        is_chat = "messages" in decoded(raw, dict[str, Any])
        body: CompletionBody | ChatBody = decoded(raw, ChatBody if is_chat else CompletionBody)
        body.model = request.headers.get(_ADAPTER_HEADER) or body.model
        return await self._answer(request, body)

    async def _tokenize(self, request: Request) -> Response:
        body = decoded(await _body(request), TokenizeBody)
        self._models.adapter(body.model)
        return JSONResponse(await asyncio.to_thread(tokenized, self._engine, body))

    async def _detokenize(self, request: Request) -> Response:
        body = decoded(await _body(request), DetokenizeBody)
        self._models.adapter(body.model)
        return JSONResponse(await asyncio.to_thread(detokenized, self._engine, body))

    async def _answer(self, request: Request, body: CompletionBody | ChatBody) -> Response:
        if self._answering is None:
            raise HttpError(503, "the server is starting or ending; try again")
        identity = request.headers.get("x-request-id")
        client = request.headers.get("authorization") or (request.client and request.client.host)
        return await _unless_gone(
            request, self._answering.answer(body, request_id=identity, client=client)
        )

    async def _load(self, request: Request) -> Response:
        body = decoded(await _body(request), LoadBody)
        if not body.lora_name or not body.lora_path:
            raise HttpError(
                400,
                "Both 'lora_name' and 'lora_path' must be provided.",
                kind="InvalidUserInput",
            )
        await self._models.load(
            body.lora_name,
            body.lora_path,
            replace=body.load_inplace,
            expected_version=body.expected_version,
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        body = decoded(await _body(request), UnloadBody)
        if not body.lora_name:
            text = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise HttpError(400, text, kind="InvalidUserInput")
        await self._models.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _add(self, request: Request) -> Response:
        given = decoded(await _body(request), dict[str, str])
        name = given.get("name", "")
        await self._models.load(name, given.get("src", ""))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._models.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(400, "Unsupported Media Type: Only 'application/json' is allowed")
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise HttpError(499, "the client is gone") from error


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """Wait for an answer, but no longer than the client does: then it is cancelled."""
    task, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnect(request))
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        return Response(status_code=499)
    gone.cancel()
    return task.result()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HttpError)
    return Response(error.body(), error.status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    del error
    found = HttpError(404, "Not Found")
    return await _refused(request, found)
