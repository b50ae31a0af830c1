"""Requests as OpenTelemetry's spans, at a collector of this test."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.served_engines import MakeGated, Spoken, waiting
from support.web_server import CHATS, COMPLETIONS, web_server

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.server.telemetry import traces
from trt_lora.runtime.server.telemetry.request_log import RequestLogConfig
from trt_lora.runtime.server.telemetry.traces import RequestTraces

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
PHASES = ["queue", "adapter_load", "prefill", "decode"]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "x=y"}


class Collector:
    """Keeps the spans that it is sent, and what they are of."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}

    def take(self, request: service.ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            self.resource = attributes(each.resource)
            for scope in each.scope_spans:
                self.spans += scope.spans


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {
        each.key: [item.string_value for item in each.value.array_value.values]
        or getattr(each.value, each.value.WhichOneof("value"))
        for each in of.attributes
    }


@contextmanager
def over_http(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            collector.take(service.ExportTraceServiceRequest.FromString(raw))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


@contextmanager
def over_grpc(collector: Collector) -> Iterator[str]:
    class Service(service_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.take(request)
            return service.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None).wait()


WAYS = {"http/protobuf": over_http, "grpc": over_grpc}


@pytest.fixture(params=WAYS)
def collected(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Collector, RequestLogConfig]]:
    """A collector of each protocol, and what a server that sends to it is told."""
    collector = Collector()
    monkeypatch.setenv(PROTOCOL, request.param)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=here")
    with WAYS[request.param](collector) as endpoint:
        yield collector, RequestLogConfig(otlp_traces_endpoint=endpoint)


def test_a_request_is_a_span_below_its_clients_with_what_it_waited_for(
    spoken: Spoken, collected: tuple[Collector, RequestLogConfig]
) -> None:
    collector, config = collected
    modules = [("a", str(spoken.adapters["a"]))]
    before = time.time_ns()
    with web_server(spoken.config(lora_modules=modules), requests=config) as web:
        web.client.headers.update(SAMPLED)
        body = {"messages": [{"role": "user", "content": "cat dog"}], "model": "a", **GREEDY}
        answer = web.answer(CHATS, **body)
        web.events(COMPLETIONS, prompt=[[1, 2, 3], [4, 5]], **GREEDY)
        web.refusal(COMPLETIONS, 404, prompt=[1], model="no such")
        web.client.get("/metrics")
    assert collector.resource["service.name"] == "trt-lora"
    assert collector.resource["deployment.environment.name"] == "here"
    tops = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
    assert [span.name for span in tops] == [
        "chat a",
        "text_completion base",
        "text_completion no such",
    ]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert {span.kind for span in tops} == {Span.SPAN_KIND_SERVER}
    chat, _, refused = map(attributes, tops)
    assert {
        "http.request.method": "POST",
        "url.path": CHATS,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "trt_lora",
        "gen_ai.request.model": "a",
        "gen_ai.response.id": answer["id"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "trt_lora.adapter.name": "a",
        "trt_lora.adapter.version": 1,
    }.items() <= chat.items()
    assert refused["http.response.status_code"] == 404
    assert refused["error.type"] == "NotFoundError"
    assert names_below(collector, tops[0]) == PHASES
    assert sorted(names_below(collector, tops[1])) == sorted([PHASES[0], *PHASES[2:]] * 2)
    assert names_below(collector, tops[2]) == []
    for top in tops:
        assert before <= top.start_time_unix_nano < top.end_time_unix_nano <= time.time_ns()
        for span in below(collector, top):
            assert top.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= top.end_time_unix_nano


def below(collector: Collector, top: Span) -> list[Span]:
    """The spans of a request's phases."""
    return [span for span in collector.spans if span.parent_span_id == top.span_id]


def names_below(collector: Collector, top: Span) -> list[str]:
    """Their names, as they begin; a load begins with its queue."""
    order = ["queue", "adapter_load", "prefill", "decode"]
    spans = below(collector, top)
    return [
        s.name for s in sorted(spans, key=lambda s: (s.start_time_unix_nano, order.index(s.name)))
    ]


def test_a_body_that_comes_slowly_is_no_part_of_the_queue(
    spoken: Spoken, collected: tuple[Collector, RequestLogConfig]
) -> None:
    collector, config = collected

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": [1, 2], '
        time.sleep(0.5)
        yield b'"max_tokens": 1}'

    with web_server(spoken.config(), requests=config) as web:
        headers = {"content-type": "application/json"}
        response = web.client.post(COMPLETIONS, content=parts(), headers=headers)
        assert response.status_code == 200
    (top,) = (span for span in collector.spans if not span.parent_span_id)
    begins = {
        span.start_time_unix_nano - top.start_time_unix_nano for span in below(collector, top)
    }
    assert len(below(collector, top)) == 3
    assert min(begins) >= 0.5e9


def test_what_a_client_does_not_sample_is_not_sent_and_a_bad_header_begins_a_trace(
    spoken: Spoken, collected: tuple[Collector, RequestLogConfig]
) -> None:
    collector, config = collected
    with web_server(spoken.config(), requests=config) as web:
        for header in (f"00-{TRACE}-{PARENT}-00", "00-zz-1", "x" * 3000, ""):
            headers = {"traceparent": header}
            web.client.post(COMPLETIONS, json={"prompt": [1], **GREEDY}, headers=headers)
    tops = [span for span in collector.spans if span.name == "text_completion base"]
    assert len(tops) == 3
    assert {span.parent_span_id for span in tops} == {b""}
    assert len({span.trace_id for span in tops}) == 3


def test_no_secret_is_in_a_span(
    spoken: Spoken, collected: tuple[Collector, RequestLogConfig]
) -> None:
    collector, config = collected
    secret = "cat dog cat dog dog"
    with web_server(spoken.config(), requests=config) as web:
        web.client.headers["authorization"] = "Bearer sk-planted"
        web.answer(COMPLETIONS, prompt=secret, **GREEDY)
        answer = web.answer(COMPLETIONS, prompt=secret, **GREEDY)["choices"][0]["text"]
        web.post(COMPLETIONS, prompt=[secret, 7])
    told = "".join(map(str, collector.spans))
    assert "text_completion" in told
    assert len(answer) > 4
    for planted in (secret, answer, "sk-planted"):
        assert planted not in told


def test_an_answer_that_fails_is_an_error(
    make_gated: MakeGated, collected: tuple[Collector, RequestLogConfig]
) -> None:
    collector, config = collected
    gated = make_gated(requests=config)
    with waiting(gated):
        gated.web.running.kill()
    gated.engine.let()
    gated.web.refusal(COMPLETIONS, 503, prompt=[1])
    gated.web.draining.should_exit = True
    make_gated.ends.close()
    assert {span.status.code for span in collector.spans if not span.parent_span_id} == {2}


@pytest.mark.parametrize("protocol", WAYS)
def test_a_collector_that_never_answers_holds_up_nothing(
    spoken: Spoken, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROTOCOL, protocol)
    monkeypatch.setattr(traces, "_LAST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = RequestLogConfig(otlp_traces_endpoint=endpoint)
        with web_server(spoken.config(), requests=config) as web:
            start = time.monotonic()
            for _ in range(20):
                web.answer(COMPLETIONS, prompt=[1, 2], **GREEDY)
            assert time.monotonic() - start < 10
            start = time.monotonic()
        assert time.monotonic() - start < 10


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL, "http/json")
    with pytest.raises(ConfigError, match="is 'http/json', expected 'grpc' or 'http/protobuf'"):
        RequestTraces("http://127.0.0.1:1")


def test_without_the_extra_who_asks_for_traces_is_told_and_nobody_else_needs_it() -> None:
    code = """if True:
        import sys
        sys.modules["opentelemetry"] = None  # as where it is not installed
        from trt_lora.plugins.errors import BackendError
        import trt_lora.runtime.server.app
        from trt_lora.runtime.server.telemetry.request_log import RequestLog, RequestLogConfig
        RequestLog(None, RequestLogConfig())
        try:
            RequestLog(None, RequestLogConfig(otlp_traces_endpoint="http://x"))
        except BackendError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("needs pip install 'trt-lora[otel]'\n")
