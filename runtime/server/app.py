"""The application: vLLM 0.33's routes over an engine, for any ASGI server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import trt_lora
from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.server.adapters.adapter_bodies import AddBody, LoadBody, UnloadBody
from trt_lora.runtime.server.answers.bodies import ChatBody, CompletionBody
from trt_lora.runtime.server.answers.running_answer import http_error
from trt_lora.runtime.server.answers.tokenizing import (
    DetokenizeBody,
    TokenizeBody,
    detokenized,
    tokenized,
    tokenizer_info,
)
from trt_lora.runtime.server.errors import GONE, HttpError
from trt_lora.runtime.server.guard import Guard, GuardConfig
from trt_lora.runtime.server.json_body import read_body
from trt_lora.runtime.server.json_values import decoded
from trt_lora.runtime.server.openapi import openapi
from trt_lora.runtime.server.page.page import page_routes
from trt_lora.runtime.server.running_server import RunningServer, ServerConfig, started
from trt_lora.runtime.server.telemetry.request_log import RequestLog, RequestLogConfig
from trt_lora.runtime.server.telemetry.request_record import record_of

_ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
_LOAD_HEADER = "endpoint-load-metrics"
_SUCCESS = "Success: LoRA adapter '{}' {} successfully."


class Server:
    """The handlers of the routes; `app` is what an ASGI server runs."""

    def __init__(
        self,
        config: ServerConfig,
        guard: GuardConfig,
        requests: RequestLogConfig | None = None,
        *,
        allows_updates: bool,
        shows_openapi: bool = True,
        shows_page: bool = True,
    ) -> None:
        """Take what is served, and to whom.

        Args:
            config: the engine, and its limits.
            guard: who may ask.
            requests: what is told of them.
            allows_updates: routes that load, unload and pin adapters exist.
            shows_openapi: `/openapi.json` exists.
            shows_page: `/` exists, the page for a browser.
        """
        self._config, self._allows_updates = config, allows_updates
        self._shows_openapi, self._shows_page = shows_openapi, shows_page
        self.running: RunningServer | None = None
        self.is_draining = False
        starlette = Starlette(
            routes=self._routes(),
            lifespan=self._lifespan,
            exception_handlers={
                HttpError: _refused,
                LoRAError: _refused,
                404: _no_route,
                405: _no_route,
                500: _failed,
            },
        )
        self._log = RequestLog(Guard(starlette, guard), requests or RequestLogConfig())
        self.app: ASGIApp = self._log

    async def start(self) -> None:
        """Open the engine, if that is not done.

        Raises:
            LoRAError: as `started`.
        """
        if self.running is None:
            self.running = await started(self._config)

    def _routes(self) -> list[Route]:
        routes = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/ready", self._ready),
            Route("/version", self._version),
            Route("/load", self._load_of_server),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._list),
            Route("/v1/lora_adapters", self._known),
            Route("/v1/lora_adapters/{name:path}", self._known_one),
            Route("/v1/lora_adapters/{name:path}/{what}", self._pin, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/invocations", self._invoke, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]
        if self._config.answers.shows_tokenizer:
            routes.append(Route("/tokenizer_info", self._tokenizer_info))
        if self._shows_openapi:
            routes.append(Route("/openapi.json", self._openapi))
        if self._shows_page:
            routes += page_routes()
        if self._allows_updates:
            routes += [
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/adapters", self._add, methods=["POST"]),
                Route("/adapters/{name:path}", self._remove, methods=["DELETE"]),
            ]
        return routes

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        await self.start()
        try:
            yield
        finally:
            running, self.running = self.running, None
            if running is not None:
                await running.close()
            await asyncio.to_thread(self._log.close)

    # ------------------------------------------------------------------ what is said of the server

    async def _health(self, request: Request) -> Response:
        del request
        is_alive = self.running is not None and not self.running.client.dead.done()
        return Response(status_code=200 if is_alive else 503)

    async def _ready(self, request: Request) -> Response:
        health = await self._health(request)
        return Response(status_code=503) if self.is_draining else health

    async def _version(self, request: Request) -> Response:
        del request
        return JSONResponse({"version": trt_lora.__version__})

    async def _load_of_server(self, request: Request) -> Response:
        del request
        return JSONResponse({"server_load": self._open().admission.requests})

    async def _metrics(self, request: Request) -> Response:
        del request
        text = await self._open().metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, request: Request) -> Response:
        del request
        document = openapi(
            allows_updates=self._allows_updates,
            shows_tokenizer=self._config.answers.shows_tokenizer,
        )
        return Response(document, media_type="application/json")

    async def _list(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": self._open().cards()})

    # ------------------------------------------------------------------------------------- answers

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, await read_body(request, CompletionBody))

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, await read_body(request, ChatBody))

    async def _invoke(self, request: Request) -> Response:
        given = await read_body(request, dict[str, Any])
        kind: type[CompletionBody | ChatBody] = ChatBody if "messages" in given else CompletionBody
        body = decoded(await request.body(), kind)
        body.model = request.headers.get(_ADAPTER_HEADER) or body.model
        return await self._answer(request, body)

    async def _answer(self, request: Request, body: CompletionBody | ChatBody) -> Response:
        running = self._open()
        answer = running.answering.answer(body, record_of(request.scope))
        response = await _unless_gone(request, answer)
        kind = request.headers.get("endpoint-load-metrics-format", "").upper()
        if kind in ("TEXT", "JSON") and not body.stream:
            response.headers[_LOAD_HEADER] = _load_report(kind, running.metrics.load())
        return response

    async def _tokenize(self, request: Request) -> Response:
        return await self._by_tokenizer(await read_body(request, TokenizeBody), tokenized)

    async def _detokenize(self, request: Request) -> Response:
        return await self._by_tokenizer(await read_body(request, DetokenizeBody), detokenized)

    async def _tokenizer_info(self, request: Request) -> Response:
        del request
        info = await asyncio.to_thread(tokenizer_info, self._config.directory)
        return JSONResponse(info)

    async def _by_tokenizer(
        self, body: TokenizeBody | DetokenizeBody, make: Callable[..., dict[str, Any]]
    ) -> Response:
        running = self._open()
        adapter = running.models.adapter(body.model)
        await running.models.offers.ready([adapter] if adapter else [])
        model = running.answering.model
        return JSONResponse(await asyncio.to_thread(make, model.tokenizer, model.manifest, body))

    # ------------------------------------------------------------------------------------ adapters

    async def _known(self, request: Request) -> Response:
        del request
        running = self._open()
        data, refused = await running.known_adapters(), running.models.offers.refused
        return JSONResponse({"object": "list", "data": data, "refused": refused})

    async def _known_one(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(await self._open().known_adapter("adapter", name))

    async def _pin(self, request: Request) -> Response:
        name, what = request.path_params["name"], request.path_params["what"]
        # Else it would be 405: a path of that shape may name an adapter that can be looked at.
        if what not in ("pin", "unpin") or not self._allows_updates:
            raise HttpError(404, "Not Found")
        return JSONResponse(await self._open().known_adapter(what, name))

    async def _load(self, request: Request) -> Response:
        body = await read_body(request, LoadBody)
        if body.is_3d_lora_weight:
            text = "is_3d_lora_weight is not supported: an engine takes no weights of experts"
            raise HttpError(400, text, "is_3d_lora_weight")
        expected = body.expected_version
        return await self._loaded(
            request,
            body.lora_name,
            body.lora_path,
            replace=body.load_inplace,
            expected_version=body.expected_generation if expected is None else expected,
        )

    async def _add(self, request: Request) -> Response:
        body = await read_body(request, AddBody)
        return await self._loaded(request, body.name, body.src)

    async def _loaded(
        self,
        request: Request,
        name: str,
        path: str,
        *,
        replace: bool = False,
        expected_version: int | None = None,
    ) -> Response:
        if not name or not path:
            text = "Both 'lora_name' and 'lora_path' must be provided."
            raise HttpError(400, text, kind="InvalidUserInput")
        self._open().admission.check_open()
        known = await self._open().models.load(
            name, path, replace=replace, expected_version=expected_version
        )
        return _told(request, _SUCCESS.format(name, "added"), known)

    async def _unload(self, request: Request) -> Response:
        body = await read_body(request, UnloadBody)
        if not body.lora_name:
            text = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise HttpError(400, text, kind="InvalidUserInput")
        freed = await self._open().models.unload(body.lora_name, wait=body.wait)
        known = {"name": body.lora_name, "bytes_freed": freed}
        return _told(request, _SUCCESS.format(body.lora_name, "removed"), known)

    async def _remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._open().models.unload(name)
        return PlainTextResponse(_SUCCESS.format(name, "removed"))

    def _open(self) -> RunningServer:
        if self.running is None:
            raise HttpError(503, "the server is starting or ending; try again", retry_after_s=1)
        return self.running


def _told(request: Request, text: str, known: dict[str, Any]) -> Response:
    """What vLLM answers; in JSON for who asks for that, as OpenAI's client always does."""
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse({"message": text, **known})
    return PlainTextResponse(text)


def _load_report(kind: str, load: dict[str, float]) -> str:
    """An ORCA report, as vLLM writes it."""
    if kind == "JSON":
        return f"JSON {json.dumps({'named_metrics': load})}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """Wait for an answer, but no longer than the client does: then it is cancelled."""
    task, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # it may fail at the same time
        return Response(status_code=GONE)  # nobody reads it
    finally:
        gone.cancel()
        task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, HttpError) else http_error(error)
    record_of(request.scope).refused(refusal)
    return refusal.response()


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    text = "Method Not Allowed" if status == 405 else "Not Found"
    response = await _refused(request, HttpError(status, text))
    response.headers.update(getattr(error, "headers", None) or {})  # Allow, of RFC 9110
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """What no handler has foreseen: the ASGI server logs it, the client is told no more."""
    del error
    return await _refused(request, HttpError(500, "the server has failed; its log says more"))
