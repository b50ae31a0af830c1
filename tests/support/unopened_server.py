"""Requests to a server whose engine is not open: what is refused, and what needs no engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx

from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.guard import GuardConfig
from trt_lora.runtime.server.running_server import ServerConfig
from trt_lora.runtime.server.telemetry.request_log import RequestLogConfig


def asked(
    guard: GuardConfig,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: bytes | AsyncIterator[bytes] | None = None,
    *,
    shows_page: bool = True,
    requests: RequestLogConfig | None = None,
) -> httpx.Response:
    """The response of a server that has not opened its engine: 503, where nothing was refused."""
    config = ServerConfig(Path("nowhere"))
    app = Server(config, guard, requests, allows_updates=True, shows_page=shows_page).app

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            request = client.build_request(method, path, headers=headers, content=body)
            return await client.send(request)

    return asyncio.run(ask())
