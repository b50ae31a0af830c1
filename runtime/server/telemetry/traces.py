"""RequestTraces: a request as OpenTelemetry's spans, below the one that its client names."""

import os
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import trt_lora
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.server.telemetry.answer_end import AnswerEnd
from trt_lora.runtime.server.telemetry.request_record import RequestRecord

_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # OpenTelemetry's own variable, which vLLM reads
_LAST_S = 3.0  # that the last spans have to leave
_OF_REQUEST = (
    ("http.request.method", "method"),
    ("url.path", "path"),
    ("http.response.status_code", "status"),
    ("error.type", "error"),
)
_OF_ANSWER = (
    ("gen_ai.request.id", "id"),
    ("gen_ai.response.id", "id"),
    ("gen_ai.request.model", "model"),
    ("trt_lora.adapter.name", "adapter"),
    ("trt_lora.adapter.version", "version"),
    ("gen_ai.usage.input_tokens", "prompt_tokens"),
    ("gen_ai.usage.prompt_tokens", "prompt_tokens"),
    ("gen_ai.usage.cache_read.input_tokens", "cached_tokens"),
    ("gen_ai.usage.output_tokens", "tokens"),
    ("gen_ai.usage.completion_tokens", "tokens"),
    ("gen_ai.latency.time_in_queue", "queue_s"),
    ("trt_lora.latency.time_in_adapter_load", "load_s"),
    ("gen_ai.latency.time_in_model_prefill", "prefill_s"),
    ("gen_ai.latency.time_in_model_decode", "decode_s"),
    ("gen_ai.latency.time_to_first_token", "first_token_s"),
    ("gen_ai.latency.e2e", "total_s"),
)


class RequestTraces:
    """Spans are made when a request has ended, and leave from a thread beside the server's.

    Names and attributes are those of OpenTelemetry's conventions for generative models, and the
    latencies' those of vLLM. A collector that is away costs spans, and no request waits for it.
    """

    def __init__(self, endpoint: str) -> None:
        """Take the address of a collector: of gRPC, or a URL with its path where HTTP is asked for.

        Raises:
            ConfigError: the variable of OpenTelemetry names another protocol.
        """
        resource = Resource.create({"service.name": "trt-lora"})
        resource = resource.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("trt_lora", trt_lora.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def tell(self, record: RequestRecord) -> None:
        """Make the spans of a request that has ended."""
        context = self._propagator.extract(record.trace)
        name = f"{record.operation or record.method} {record.model or record.path}"
        start = record.began_at
        span = self._tracer.start_span(
            name, context, SpanKind.SERVER, dict(_attributes(record)), start_time=_ns(start)
        )
        if record.status >= 500 or any(end.reason == "error" for end in record.ends):
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span, Context())
        for index, end in enumerate(record.ends):
            if end.times is not None and end.first_s is not None:
                self._phases(below, record, index, end)
        span.end(_ns(start + record.total_s))

    def close(self) -> None:
        """Let the last spans leave; it takes no longer than seconds."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_S)

    def _phases(self, context: Context, record: RequestRecord, index: int, end: AnswerEnd) -> None:
        """An answer's time: known by lengths, and by when its first token came."""
        assert end.times is not None
        assert end.first_s is not None
        times, last = end.times, record.began_at + record.total_s
        first = record.began_at + record.body_s + end.first_s
        row = first - times.prefill_s
        submitted = row - times.queue_s
        for name, begin, seconds in (
            ("queue", submitted, times.queue_s),
            *([("adapter_load", submitted, times.load_s)] if record.adapters else []),
            ("prefill", row, times.prefill_s),
            ("decode", first, times.decode_s),
        ):
            index_of = {"trt_lora.choice.index": index}
            span = self._tracer.start_span(
                name, context, attributes=index_of, start_time=_ns(begin)
            )
            span.end(_ns(min(begin + seconds, last)))


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    """What is known of a request, by the names of OpenTelemetry, or else of vLLM."""
    facts = record.facts()
    yield from ((name, facts[fact]) for name, fact in _OF_REQUEST if fact in facts)
    if record.operation is None:
        return
    yield "gen_ai.operation.name", record.operation
    yield "gen_ai.provider.name", "trt_lora"
    yield from ((name, facts[fact]) for name, fact in _OF_ANSWER if fact in facts)
    if record.sampling is not None:
        yield "gen_ai.request.choice.count", record.sampling.n
        for name in ("temperature", "top_p", "top_k", "max_tokens"):
            if (value := getattr(record.sampling, name)) is not None:
                yield f"gen_ai.request.{name}", value
    if record.ends:
        yield "gen_ai.response.finish_reasons", [end.reason for end in record.ends]


def _exporter(endpoint: str) -> SpanExporter:
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        return trace_exporter.OTLPSpanExporter(endpoint=endpoint)
    raise ConfigError(f"{_PROTOCOL} is {protocol!r}, expected 'grpc' or 'http/protobuf'")


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
