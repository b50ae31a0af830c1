"""Replica: the server's application over an engine, without a port of its own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.types import Message, Scope, Send

from trt_lora.runtime.scaleout.everywhere import Whole
from trt_lora.runtime.scaleout.outbox import Outbox
from trt_lora.runtime.scaleout.residency import Wish
from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.errors import HttpError

_LOG = logging.getLogger(__name__)


class Replica:
    """Answers requests that come as ASGI scopes; the messages of a step leave together."""

    async def open(self, server: Server, name: str) -> None:
        """Open the engine.

        Args:
            server: whose application answers.
            name: of this replica, among the others.

        Raises:
            LoRAError: as `started`.
        """
        await server.start()
        assert server.running is not None
        self._app, self._name = server.app, name
        self._client, self._models = server.running.client, server.running.models
        self._outboxes: dict[str, Outbox[tuple[int, Message]]] = {}  # by ingress

    async def http(self, wish: Wish, ingress: str, number: int, scope: Scope, body: bytes) -> str:
        """Answer a request; its messages leave through the stream of its ingress.

        Returns:
            Its own name, if the ingress has to listen to it and to ask again; else nothing.
        """
        outbox = self._outboxes.get(ingress)
        if outbox is None or outbox.is_lost:
            outbox = self._outboxes[ingress] = Outbox()
            if not wish.replica:
                return self._name

        async def send(message: Message) -> None:
            outbox.put((number, message))

        outbox.requests += 1
        try:
            await self._run(scope, body, send)
        finally:
            outbox.requests -= 1
        return ""

    async def events(self, wish: Wish, ingress: str) -> AsyncIterator[list[tuple[int, Message]]]:
        """Yield what is said to an ingress, a step of the engine at a time."""
        del wish
        outbox = self._outboxes.setdefault(ingress, Outbox())
        async for batch in outbox.batches():
            yield batch
        if self._outboxes.get(ingress) is outbox:
            del self._outboxes[ingress]

    async def whole(self, scope: Scope, body: bytes, name: str | None) -> Whole:
        """Return the whole answer to a request, which may change what a name means."""
        before, parts = self._models.loaded.get(name or ""), list[Message]()

        async def send(message: Message) -> None:
            parts.append(message)

        await self._run(scope, body, send)
        text = b"".join(part.get("body", b"") for part in parts)
        return Whole(self._name, parts[0]["status"], parts[0]["headers"], text, before)

    async def undo(self, name: str, paths: Mapping[str, str | None]) -> None:
        """Let a name mean again what it meant in the replicas that are named."""
        if self._name in paths:
            before = paths[self._name]
            if before is None:
                await self._models.unload(name)
            else:
                await self._models.load(name, before, replace=True)

    async def loaded(self) -> dict[str, str]:
        """Return the paths of what was loaded over HTTP, by name."""
        return self._models.loaded

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the fields of a `Residency`."""
        stats, wanted = await self._client.ask("stats"), self._client.waiting_adapters
        known = {"slots": stats["slots"], "resident": stats["resident"]}
        load = {"queue": len(self._client), "rows": self._client.rows}
        return {**known, **load, "wanted": sorted(wanted)}

    async def check_health(self) -> None:
        """Ask the engine; one that hangs does not answer.

        Raises:
            BackendError: it is gone.
        """
        await self._client.ask("stats")

    async def load(self, paths: Mapping[str, str]) -> None:
        """Load what other replicas have under names that are free here."""
        for name in paths.keys() - self._models.loaded.keys():
            try:
                await self._models.load(name, paths[name])
            except HttpError as error:
                _LOG.warning("%s, which another replica has, is not loaded: %s", name, error)

    async def _run(self, scope: Scope, body: bytes, send: Send) -> None:
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            while not given:  # a client that leaves cancels this
                await asyncio.sleep(3600)
            return given.pop()

        await self._app(dict(scope), receive, send)
