"""What Triton's Python backend gives a model: tensors, responses, requests, metrics."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any, ClassVar
from weakref import WeakSet

from trt_lora.runtime.memory.dtypes import Array

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


@dataclass(frozen=True)
class Tensor:
    """A named array."""

    title: str
    array: Array

    def name(self) -> str:
        return self.title

    def as_numpy(self) -> Array:
        return self.array


class TritonError(Exception):
    """Why a request has no answer."""


@dataclass(frozen=True)
class InferenceResponse:
    """Outputs, or an error."""

    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


@dataclass
class FakeRequest:
    """A request, which is its own sender, and what was sent."""

    arrays: Mapping[str, Array]
    others: Mapping[str, Any] = field(default_factory=dict)
    responses: list[InferenceResponse] = field(default_factory=list)
    ended: Event = field(default_factory=Event)
    has_left: bool = False
    is_broken: bool = False  # no response can be sent
    ends_empty: bool = False
    may_send: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.may_send.set()

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.arrays.items()]

    def parameters(self) -> str:
        return json.dumps(self.others)

    def get_response_sender(self) -> "FakeRequest":
        return self

    def is_cancelled(self) -> bool:
        return self.has_left

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended.is_set(), "a response behind the last"
        assert self.may_send.wait(30)
        if self.is_broken and not (response and response.error):
            raise OSError("the shared memory is full")
        if response is not None:
            self.responses.append(response)
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ends_empty = response is None
            self.ended.set()

    def outputs(self, name: str) -> list[Any]:
        """The values of an output in all responses to a request that has ended without an error."""
        assert not self.error, self.error
        found = [t for each in self.responses for t in each.output_tensors if t.title == name]
        return [value for tensor in found for value in tensor.array.ravel().tolist()]

    @property
    def error(self) -> str:
        """Of a request that has ended; empty where there is none."""
        assert self.ended.wait(30), "no last response"
        return "".join(str(each.error) for each in self.responses if each.error)


@dataclass
class Metric:
    """A series, which Triton shows as long as its family is there."""

    labels: Mapping[str, str]
    value: float = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        assert value >= 0
        self.value += value


class MetricFamily:
    """A family of metrics; the class knows all there are, and keeps none."""

    COUNTER, GAUGE = "counter", "gauge"
    shown: ClassVar[WeakSet["MetricFamily"]] = WeakSet()

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert description
        self.name, self.kind, self.metrics = name, kind, list[Metric]()
        self.shown.add(self)

    def Metric(self, *, labels: Mapping[str, str]) -> Metric:
        self.metrics.append(Metric(labels))
        return self.metrics[-1]
