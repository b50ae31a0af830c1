"""What Triton's Python backend gives a model: tensors, responses, requests with their senders."""

from dataclasses import dataclass, field
from threading import Event
from typing import Any

from trt_lora.runtime.memory.dtypes import Array

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


@dataclass(frozen=True)
class Tensor:
    """A named array."""

    name: str
    array: Array

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

    inputs: dict[str, Array]
    responses: list[InferenceResponse] = field(default_factory=list)
    ended: Event = field(default_factory=Event)

    def get_response_sender(self) -> "FakeRequest":
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended.is_set(), "a response behind the last"
        if response is not None:
            self.responses.append(response)
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ended.set()

    def answer(self) -> list[Any]:
        """The tokens, or the text of the error, of a request that has ended."""
        assert self.ended.wait(30), "no last response"
        return [
            str(each.error) if each.error else each.output_tensors[0].array.item()
            for each in self.responses
        ]


def get_input_tensor_by_name(request: FakeRequest, name: str) -> Tensor | None:
    """Return an input; None where an optional one is not there."""
    return Tensor(name, request.inputs[name]) if name in request.inputs else None
