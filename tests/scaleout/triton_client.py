"""Requests to a model in Triton: over HTTP as JSON, and over gRPC as tensors."""

# pyright: reportMissingImports=false

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scaleout.triton_server import Triton
from tritonclient import grpc

KINDS = {"max_tokens": np.int32, "stream": np.bool_, "lora_task_id": np.uint64}
KINDS |= {"input_ids": np.int32, "lora_config": np.int32, "lora_weights": np.float16}


@dataclass
class Answered:
    """An answer: what all responses to a request say together."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    responses: int = 0
    is_ended: bool = False  # by a last response without outputs
    error: str = ""


def posted(triton: Triton, path: str, **body: object) -> tuple[int, str]:
    """Return the status and what is answered to JSON, error or not."""
    given, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://{triton.http}/v2/{path}", given, headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generated(triton: Triton, model: str, **body: object) -> Answered:
    """Return the answer of `generate_stream`, or of `generate` to what does not stream."""
    way = "generate_stream" if body.get("stream") else "generate"
    _, text = posted(triton, f"models/{model}/{way}", **body)
    found = Answered()
    for event in text.strip().split("\n\n"):
        said = json.loads(event.removeprefix("data: "))
        ids = said.get("token_id", [])
        found.text += said.get("text_output", "")
        found.ids += ids if isinstance(ids, list) else [ids]
        found.finish_reason = said.get("finish_reason", found.finish_reason)
        found.logprobs += json.loads(said.get("logprobs", "[]"))
        found.error += said.get("error", "")
        found.responses += 1
    return found


class Stream:
    """A gRPC stream, whose requests are told apart by their numbers."""

    def __init__(self, client: grpc.InferenceServerClient, batch: tuple[int, ...]) -> None:
        """Begin; `batch` are the dimensions that inputs have before their own."""
        self._client, self._batch, self._asked = client, batch, 0
        self._events = queue.Queue[tuple[Any, Any]]()
        self.answers: dict[str, Answered] = {}
        client.start_stream(lambda result, error: self._events.put((result, error)))

    def ask(self, model: str, **inputs: Any) -> Answered:
        """Send a request; return its answer, which `read` fills."""
        self._asked += 1
        number = str(self._asked)
        tensors = [self._tensor(name, value) for name, value in inputs.items()]
        self._client.async_stream_infer(
            model, tensors, request_id=number, enable_empty_final_response=True
        )
        return self.answers.setdefault(number, Answered())

    def read(self) -> Answered:
        """Take one response; return the answer that it belongs to."""
        result, error = self._events.get(timeout=60)
        if error is not None:  # an error has no number: it is of the only one that has not ended
            left = [each for each in self.answers.values() if not each.is_ended]
            assert len(left) == 1, f"{len(left)} answers have not ended, and one of them: {error}"
            (answer,) = left
            answer.error, answer.is_ended = str(error), True
            return answer
        answer = self.answers[result.get_response().id]
        answer.is_ended = result.get_response().parameters["triton_final_response"].bool_param
        if result.as_numpy("text_output") is None:
            assert answer.is_ended, "a response without outputs is the last one"
            return answer
        answer.responses += 1
        answer.text += result.as_numpy("text_output").item().decode()
        if (ids := result.as_numpy("token_id")) is not None:
            answer.ids += ids.ravel().tolist()
        if (reason := result.as_numpy("finish_reason")) is not None:
            answer.finish_reason = reason.item().decode()
        return answer

    def whole(self, answer: Answered) -> Answered:
        """Read until an answer has ended."""
        while not answer.is_ended:
            self.read()
        return answer

    def _tensor(self, name: str, value: Any) -> grpc.InferInput:
        kind = KINDS.get(name, np.object_)
        array: Any = np.array(value.encode() if isinstance(value, str) else value, kind)
        shape = array.shape if array.ndim else (1,)
        array = array.reshape(*self._batch, *shape)
        named = {np.object_: "BYTES", np.bool_: "BOOL", np.float16: "FP16"}
        tensor = grpc.InferInput(
            name, list(array.shape), named.get(kind, np.dtype(kind).name.upper())
        )
        tensor.set_data_from_numpy(array)
        return tensor


@contextmanager
def streaming(triton: Triton, batch: tuple[int, ...] = (1,)) -> Iterator[Stream]:
    """Open a stream; at the end of the block everything that it has asked for is cancelled."""
    with grpc.InferenceServerClient(triton.grpc) as client:
        yield Stream(client, batch)
        client.stop_stream(cancel_requests=True)


def metric(triton: Triton, name: str, **labels: str) -> list[float]:
    """The values of the series of a metric that have some labels."""
    with urllib.request.urlopen(f"http://{triton.metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"{name}{{") and all(each in line for each in wanted)
    ]
