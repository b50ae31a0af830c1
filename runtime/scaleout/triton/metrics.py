"""Metrics: what the server tells Prometheus, as far as Triton's custom metrics have the kinds.

Those are counters and gauges; histograms are in newer releases alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import time
from typing import Any

from trt_lora.runtime.scaleout.triton.responder import Responder
from trt_lora.runtime.server.engine_process.adapter_desk import AdapterDesk
from trt_lora.runtime.serving.scheduler import Scheduler

_INFO = "vllm:lora_requests_info"
_TEXTS = {
    "vllm:num_requests_running": "Requests in rows",
    "vllm:num_requests_waiting": "Requests without one",
    "vllm:kv_cache_usage_perc": "Part of the rows in use",
    _INFO: "Adapters in slots, and those wanted that are not there",
    "trt_lora:adapters": "Adapters by where they lie",
    "trt_lora:adapter_loads_total": "Loads into memory and into slots",
    "vllm:prompt_tokens_total": "Of prompts",
    "vllm:generation_tokens_total": "Of answers",
    "vllm:request_success_total": "Answers that have ended",
    "vllm:prefix_cache_queries_total": "Tokens of prompts that were looked up",
    "vllm:prefix_cache_hits_total": "Tokens of those that were not run",
    "vllm:num_preemptions_total": "Times that a request has lost its row",
}


@dataclass(frozen=True)
class Sample:
    """The value of one series now."""

    name: str
    value: float
    labels: Mapping[str, str]

    @property
    def key(self) -> tuple[str, ...]:
        """Of the series; where labels tell what is true now, they are none of it."""
        told = () if self.name == _INFO else self.labels.values()
        return (self.name, *told)

    @property
    def is_count(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith("_total")


class Readings:
    """What is true of one model now."""

    def __init__(self, scheduler: Scheduler, desk: AdapterDesk, rows: int) -> None:
        """Take what knows."""
        self._scheduler, self._desk, self._rows = scheduler, desk, rows

    def read(self, responder: Responder) -> Iterator[Sample]:
        """Yield all samples, without the labels that all have."""
        running, counts = self._scheduler.running, self._scheduler.counts
        stats = self._desk.answer("stats", {})
        yield Sample("vllm:num_requests_running", running, {})
        yield Sample("vllm:num_requests_waiting", max(len(self._scheduler) - running, 0), {})
        yield Sample("vllm:kv_cache_usage_perc", running / self._rows, {})
        yield Sample(_INFO, time(), _residency(stats, responder))
        yield from _labelled("trt_lora:adapters", stats["levels"], "level")
        yield from _labelled("trt_lora:adapter_loads_total", stats["loads"], "level")
        yield from _labelled("vllm:request_success_total", responder.ended, "finished_reason")
        yield Sample("vllm:prompt_tokens_total", responder.prompt_tokens, {})
        yield Sample("vllm:generation_tokens_total", responder.tokens, {})
        yield Sample("vllm:prefix_cache_queries_total", counts.asked, {})
        yield Sample("vllm:prefix_cache_hits_total", counts.shared, {})
        yield Sample("vllm:num_preemptions_total", counts.preempted, {})


class TritonMetrics:
    """The series of one model in Triton."""

    def __init__(self, families: Any, model: str) -> None:
        """Begin without a series.

        Args:
            families: Triton's class `MetricFamily`.
            model: its name, a label of all series.
        """
        self._families, self._labels = families, {"model_name": model, "engine": "0"}
        self._series: dict[tuple[str, ...], _Series] = {}

    def publish(self, samples: Iterable[Sample]) -> None:
        """Let Triton have values."""
        for sample in samples:
            found = self._series.get(sample.key)
            if found is None or found.labels != sample.labels:
                self._series.pop(sample.key, None)
                self._series[sample.key] = found = self._new(sample)
            found.tell(sample.value)

    def _new(self, sample: Sample) -> "_Series":
        """Make a series, with a family of its own: as long as there is that, Triton shows it."""
        kind = self._families.COUNTER if sample.is_count else self._families.GAUGE
        family = self._families(name=sample.name, description=_TEXTS[sample.name], kind=kind)
        metric = family.Metric(labels={**self._labels, **sample.labels})
        return _Series(sample, family, metric)


class _Series:
    """What Triton was told of one."""

    def __init__(self, first: Sample, family: Any, metric: Any) -> None:
        self.labels, self._is_count, self._told = first.labels, first.is_count, 0.0
        self._family, self._metric = family, metric

    def tell(self, value: float) -> None:
        """Tell Triton a value that it does not know."""
        if value == self._told:
            return
        if self._is_count:
            self._metric.increment(value - self._told)
        else:
            self._metric.set(value)
        self._told = value


def _labelled(name: str, values: Mapping[str, float], label: str) -> Iterator[Sample]:
    for key, value in values.items():
        yield Sample(name, value, {label: key})


def _residency(stats: Mapping[str, Any], responder: Responder) -> dict[str, str]:
    """Labels as the server has them: adapters in slots, and those wanted that are in none."""
    resident = stats["resident"]
    wanted = {answer.adapter for answer in list(responder.answers.values()) if answer.adapter}
    return {
        "max_lora": str(stats["slots"]),
        "running_lora_adapters": ",".join(resident),
        "waiting_lora_adapters": ",".join(sorted(wanted.difference(resident))),
    }
