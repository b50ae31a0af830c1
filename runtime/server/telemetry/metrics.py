"""ServerMetrics: what Prometheus and routers are told, under vLLM 0.33's names."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from trt_lora.runtime.server.admission import Admission
from trt_lora.runtime.server.engine_process.engine_client import EngineClient

# vLLM's buckets, in seconds and tokens (vllm/v1/metrics/buckets.py and loggers.py).
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LABELS = ("model_name", "engine")


class ServerMetrics:
    """A registry of its own: two servers in a process do not share a series."""

    def __init__(self, client: EngineClient, admission: Admission, model: str) -> None:
        """Begin at zero."""
        self._client, self._admission, self._labels = client, admission, (model, "0")
        self._stats: Mapping[str, Any] = {}
        self._registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts")
        self._made = counter("vllm:generation_tokens", "Tokens of answers")
        self._ended = Counter(
            "vllm:request_success",
            "Answers that have ended",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._first = histogram("vllm:time_to_first_token_seconds", "To the first token", _FIRST)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Whole requests", _WHOLE)
        self._gaps = [0] * (len(_BETWEEN) + 1)  # between tokens, by bucket
        self._gaps_s = 0.0
        self._registry.register(self)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """Note that an answer begins."""
        self._first.observe(seconds)
        self._prompt.inc(prompt_tokens)

    def next_token(self, seconds: float) -> None:
        """Note the time between two events of one answer; of all metrics, each token has this."""
        self._gaps[bisect_left(_BETWEEN, seconds)] += 1
        self._gaps_s += seconds

    def ended(self, reason: str, seconds: float, tokens: int) -> None:
        """Note that an answer has ended."""
        self._ended.labels(*self._labels, reason).inc()
        self._made.inc(tokens)
        self._whole.observe(seconds)

    async def text(self) -> bytes:
        """Return the exposition; the engine is asked for its adapters."""
        self._stats = await self._client.ask("stats")
        return generate_latest(self._registry)

    def load(self) -> dict[str, float]:
        """Return how full the engine is, as ORCA reports name it."""
        return {
            "kv_cache_usage_perc": self._client.running / max(self._client.rows, 1),
            "num_requests_waiting": float(self._client.queued),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield what is true now; prometheus_client calls it."""
        load = self.load()
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in rows", self._client.running),
            ("vllm:num_requests_waiting", "Requests without one", self._client.queued),
            ("vllm:kv_cache_usage_perc", "Part of the rows in use", load["kv_cache_usage_perc"]),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield self._between()
        yield self._lora_info()
        yield self._levels()
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused", labels=(*_LABELS, "reason")
        )
        for reason, count in self._admission.rejections.items():
            refused.add_metric((*self._labels, reason), count)
        yield refused

    def _between(self) -> Metric:
        name, text = "vllm:inter_token_latency_seconds", "Between tokens"
        histogram = HistogramMetricFamily(name, text, labels=_LABELS)
        bounds = [*(str(float(bound)) for bound in _BETWEEN), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._gaps), strict=True))
        histogram.add_metric(self._labels, buckets, self._gaps_s)
        return histogram

    def _lora_info(self) -> Metric:
        """One series, whatever adapters there are: the newest labels alone."""
        running = self._stats.get("resident", [])
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in slots, and those wanted that are not there",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        slots = str(self._stats.get("slots", 0))
        waiting = self._client.waiting_adapters - set(running)
        labels = (slots, ",".join(running), ",".join(sorted(waiting)))
        gauge.add_metric(labels, time.time())
        return gauge

    def _levels(self) -> Metric:
        gauge = GaugeMetricFamily(
            "trt_lora:adapters", "Adapters by where they lie", labels=(*_LABELS, "level")
        )
        known, memory, slots = (
            self._stats.get(name, 0) for name in ("registered", "in_memory", "in_slots")
        )
        for level, count in (("slot", slots), ("memory", memory - slots), ("disk", known - memory)):
            gauge.add_metric((*self._labels, level), count)
        return gauge

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)
        return made.labels(*self._labels)
