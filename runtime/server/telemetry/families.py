"""Families: what is true at a moment, in prometheus_client's shapes and with vLLM's labels."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from trt_lora.runtime.server.telemetry.buckets import cumulative

V = TypeVar("V")
Made = tuple[Sequence[int], float]  # values in each bucket, and their sum


class Families:
    """Series of one model; where there are several of a name, each has one label more."""

    def __init__(self, model: str) -> None:
        """Take the name of the base model."""
        self._labels = {"model_name": model, "engine": "0"}

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Return one value."""
        return self.gauges(name, text, {"": value})

    def gauges(
        self, name: str, text: str, values: Mapping[str, float], label: str | None = None
    ) -> Metric:
        """Return a value for each value of a label."""
        family = GaugeMetricFamily(name, text, labels=self._names(label))
        for labels, value in self._series(values, label):
            family.add_metric(labels, value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Return one count."""
        return self.counters(name, text, {"": value})

    def counters(
        self, name: str, text: str, values: Mapping[str, float], label: str | None = None
    ) -> Metric:
        """Return a count for each value of a label."""
        family = CounterMetricFamily(name, text, labels=self._names(label))
        for labels, value in self._series(values, label):
            family.add_metric(labels, value)
        return family

    def histograms(
        self,
        name: str,
        text: str,
        values: Mapping[str, Made],
        bounds: Sequence[float],
        *,
        told: Sequence[float] | None = None,
        label: str | None = None,
    ) -> Metric:
        """Return a histogram for each value of a label; of its bounds some may be told alone."""
        family = HistogramMetricFamily(name, text, labels=self._names(label))
        for labels, (counts, total) in self._series(values, label):
            family.add_metric(labels, cumulative(counts, bounds, told or bounds), total)
        return family

    def _names(self, label: str | None) -> list[str]:
        return [*self._labels, *([label] if label else [])]

    def _series(self, values: Mapping[str, V], label: str | None) -> list[tuple[list[str], V]]:
        own = list(self._labels.values())
        return [([*own, *([key] if label else [])], value) for key, value in values.items()]
