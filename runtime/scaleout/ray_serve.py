"""Ray Serve: replicas of the server, each with an engine, and requests that find their adapter.

`serve run trt_lora.runtime.scaleout.ray_serve:app engine=engines/many lora_dir=adapters replicas=2`
"""

# pyright: reportMissingImports=false
import asyncio
import itertools
import logging
from collections.abc import Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.scaleout.everywhere import Whole, is_for_all, loaded_name, together
from trt_lora.runtime.scaleout.passing import SCOPE, Inbox, Passed, whole_body, wish_of
from trt_lora.runtime.scaleout.ray_config import RayConfig
from trt_lora.runtime.scaleout.replica import Replica
from trt_lora.runtime.scaleout.residency import Residency, Wish, differing, ranked
from trt_lora.runtime.server.errors import HttpError

_LOG = logging.getLogger(__name__)
_STATS_S = 0.2  # between two looks of the routers at what lies in slots
_CONNECTIONS = 4096  # of an ingress


class ResidencyRouter(RequestRouter):  # type: ignore[misc] # Ray has no types here
    """Prefers replicas as `ranked` does; each request is matched with the one chosen for it."""

    def initialize_state(self, spill_after: int) -> None:
        """Take the deployment's `request_router_kwargs`."""
        self._spill_after, self._differing = spill_after, list[str]()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        wish = pending_request.args[0]
        pending_request.routing_context.should_backoff = True  # before it asks here again
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if wish.replica:
            return [[by_name[wish.replica]]] if wish.replica in by_name else []
        found = {name: self._residency(replica) for name, replica in by_name.items()}
        if (now := differing(found)) != self._differing:
            self._differing = now
            _LOG.warning("replicas have other contents under one name: %s", now)
        return [[by_name[name]] for name in ranked(found, wish.adapters, self._spill_after)]

    def _residency(self, replica: RunningReplica) -> Residency:
        told = Residency(**replica.routing_stats)
        calls = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return replace(told, queue=max(told.queue, calls - 1))  # one is the stream of events


class RayReplica(Replica):
    """A replica that knows the others."""

    async def __init__(self, config: RayConfig) -> None:  # type: ignore[misc] # Ray awaits it
        """Open the engine, and load what the other replicas have loaded."""
        context = serve.get_replica_context()
        await self.open(config.application(), context.replica_id.unique_id)
        self._others = serve.get_deployment_handle(context.deployment, context.app_name)
        self._looks = 2  # at the others: one more when requests come here, too
        await self._look()

    async def check_health(self) -> None:
        """Ask the engine, which answers unless it hangs or is gone."""
        await super().check_health()
        await self._look()

    async def _look(self) -> None:
        if self._looks:
            self._looks -= 1
            found: list[Any] = []
            with suppress(DeploymentUnavailableError):  # this is the first one
                found = await self._others.broadcast("loaded").results_async(return_exceptions=True)
            for told in found:
                await self.load(told if isinstance(told, dict) else {})


class Ingress:
    """Reads which adapter a request means, and passes bytes on, there and back."""

    def __init__(self, replicas: DeploymentHandle[Any], base: str) -> None:
        """Take the replicas, and the base model's name."""
        self._replicas, self._base = replicas, base
        self._name = serve.get_replica_context().replica_id.unique_id
        self._numbers = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._streams = set[asyncio.Task[None]]()

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            body = await whole_body(request)
        except HttpError as error:
            return error.response()
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        if is_for_all(scope["method"], scope["path"]):
            return await self._everywhere(scope, body)
        return Passed(partial(self.pass_on, scope, body))

    async def pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send what a replica answers; it stops when this is cancelled."""
        number, inbox = next(self._numbers), Inbox()
        self._inboxes[number] = inbox
        call = asyncio.create_task(self._call(number, scope, body))
        try:
            await inbox.empty(send)
        finally:
            del self._inboxes[number]
            call.cancel()

    async def _call(self, number: int, scope: Scope, body: bytes) -> None:
        """Let a replica answer; what goes wrong with that comes as an error."""
        wish = wish_of(scope, body, self._base)
        try:
            if place := await self._sent(wish, number, scope, body):
                there = replace(wish, replica=place)
                # In a context of its own: calls of one request have one number, and a router
                # that looks for a replica for two of them at a time finds one for the last alone.
                stream = asyncio.create_task(self._listen(there), context=Context())
                self._streams.add(stream)
                stream.add_done_callback(self._streams.discard)
                await self._sent(there, number, scope, body)
        except BackPressureError:
            self._inboxes[number].put(HttpError(503, "all replicas are full", retry_after_s=1))
        except RayError:
            self._inboxes[number].put(HttpError(503, "the replica is gone; ask again"))

    async def _sent(self, wish: Wish, number: int, scope: Scope, body: bytes) -> str:
        response = self._replicas.http.remote(wish, self._name, number, scope, body)
        try:
            return str(await response)
        except asyncio.CancelledError:
            response.cancel()
            raise

    async def _listen(self, wish: Wish) -> None:
        stream = self._replicas.options(stream=True).events.remote(wish, self._name)
        try:
            async for batch in stream:
                for number, message in batch:
                    if inbox := self._inboxes.get(number):
                        inbox.put(message)
        except RayError as error:
            _LOG.warning("a replica is gone, and its requests fail: %s", type(error).__name__)

    async def _everywhere(self, scope: Scope, body: bytes) -> Response:
        name = loaded_name(scope["path"], body)
        asked = self._replicas.broadcast("whole", scope, body, name)
        found = await asked.results_async(return_exceptions=True)
        told = [whole for whole in found if isinstance(whole, Whole)]
        taken = {whole.replica: whole.path for whole in told if whole.is_taken}
        if name and 0 < len(taken) < len(found):
            await self._replicas.broadcast("undo", name, taken).results_async()
        if not told:
            return HttpError(503, "no replica answers", retry_after_s=1).response()
        return together(told, scope["path"])


def trt_lora_app(engine: str, lora_dir: str | None = None, **options: Any) -> serve.Application:
    """Return an application of Ray Serve; `options` are the other fields of `RayConfig`.

    Raises:
        ConfigError: an option is unknown, or has no meaning.
        LoRAError: as `read_manifest`.
    """
    return app({"engine": engine, "lora_dir": lora_dir, **options})


def app(args: Mapping[str, Any]) -> serve.Application:
    """Return the same for `serve run`, whose arguments are the fields of `RayConfig`."""
    config = RayConfig.of(args)
    router = RequestRouterConfig(
        request_router_class=ResidencyRouter,
        request_router_kwargs={"spill_after": config.spill_after},
        request_routing_stats_period_s=_STATS_S,
    )
    options = config.deployment(read_manifest(config.engine).max_batch_size)
    replicas = serve.deployment(RayReplica, request_router_config=router, **options)
    ingress = serve.deployment(Ingress, max_ongoing_requests=_CONNECTIONS)
    return ingress.bind(replicas.bind(config), config.base)
