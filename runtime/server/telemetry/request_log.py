"""RequestLog: a line and the spans of each request, when it ends; pure ASGI, before all else."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.server.log_lines import with_facts
from trt_lora.runtime.server.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from trt_lora.runtime.server.telemetry.traces import RequestTraces  # of an extra

_LOG = logging.getLogger("trt_lora.requests")  # a name that whoever reads lines can tell


@dataclass(frozen=True)
class RequestLogConfig:
    """What is told of requests, beside metrics."""

    returns_ids: bool = False  # X-Request-Id comes back, made where there is none
    has_lines: bool = True  # in the log
    quiet_paths: Collection[str] = ()  # that have none
    otlp_traces_endpoint: str | None = None  # of a collector of OpenTelemetry


class RequestLog:
    """Tells of what was asked for at level INFO, of what was only looked at at level DEBUG."""

    def __init__(self, app: ASGIApp, config: RequestLogConfig) -> None:
        """Stand before an application.

        Raises:
            BackendError: the extra for traces is not installed.
            ConfigError: as `RequestTraces`.
        """
        self._app, self._config = app, config
        endpoint = config.otlp_traces_endpoint
        self._traces = None if endpoint is None else _traces(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request be answered."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = RequestRecord.of(scope)
        identity = record.id.encode("latin-1")  # as it came: an answer has a longer one

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if self._config.returns_ids:
                    headers = [*message["headers"], (b"x-request-id", identity)]
                    message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._tell(record)

    def close(self) -> None:
        """Let the last spans leave."""
        if self._traces is not None:
            self._traces.close()

    def _tell(self, record: RequestRecord) -> None:
        record.total_s = time.perf_counter() - record.start
        level = logging.DEBUG if record.only_looks else logging.INFO
        has_line = self._config.has_lines and record.path not in self._config.quiet_paths
        if has_line and _LOG.isEnabledFor(level):
            _LOG.log(level, "request", extra=with_facts(record.facts()))
        if self._traces is not None and not record.only_looks:
            self._traces.tell(record)


def _traces(endpoint: str) -> "RequestTraces":
    try:
        from trt_lora.runtime.server.telemetry.traces import RequestTraces
    except ImportError as error:
        text = f"{error}; --otlp-traces-endpoint needs pip install 'trt-lora[otel]'"
        raise BackendError(text) from error
    return RequestTraces(endpoint)
