"""The model that Triton's Python backend runs: requests of all kinds share one `EngineLoop`."""

# pyright: reportMissingImports=false

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import triton_python_backend_utils as triton

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.sequence import Sequence as Request
from trt_lora.runtime.generation.text.prompts import Prompt
from trt_lora.runtime.generation.text.tokenizer import TOKENIZER_FILE
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.scaleout.triton.answer import TritonAnswer
from trt_lora.runtime.scaleout.triton.asked import Asked, read_asked
from trt_lora.runtime.scaleout.triton.asked_adapters import AskedAdapters
from trt_lora.runtime.scaleout.triton.metrics import Readings, TritonMetrics
from trt_lora.runtime.scaleout.triton.responder import Responder, fail
from trt_lora.runtime.scaleout.triton.settings import read_settings
from trt_lora.runtime.server.answers.sampling_json import sampling_from
from trt_lora.runtime.server.engine_process.adapter_desk import AdapterDesk
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.runtime.serving.serving_config import ServingConfig

_QUEUED = 8  # requests for each row that wait, where nothing else is said


class TritonPythonModel:
    """Reads requests and submits them; `Responder` sends their answers."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the engine and start the threads.

        Raises:
            LoRAError: a parameter has no meaning, or the engine cannot be opened; Triton says so,
                and does not load the model.
        """
        config = json.loads(args["model_config"])
        self._settings = settings = read_settings(config.get("parameters", {}))
        self._is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._shape = (1, -1) if config.get("max_batch_size") else (-1,)
        with ExitStack() as opening:
            self._engine = engine = opening.enter_context(settings.open())
            self._sampling = default_sampling(engine.directory)
            has_text = (engine.directory / TOKENIZER_FILE).is_file()
            self._tokenizer = engine.tokenizer if has_text else None
            self._adapters = AskedAdapters(engine.adapters, settings.adapters)
            self._rows = settings.rows or engine.manifest.max_batch_size
            self._start(opening, args["model_name"])
            self._open = opening.pop_all()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; their answers come as they are made."""
        for request in requests:
            reply = _Sender(request.get_response_sender(), self._shape)
            _reported(reply, partial(self._take, request, reply))

    def finalize(self) -> None:
        """Stop: Triton calls this when every request is answered."""
        self._open.close()

    def _start(self, opening: ExitStack, model: str) -> None:
        """Start what is to be closed in the reverse order: the engine's loop before the rest."""
        scheduler = self._engine.serve(ServingConfig(rows=self._rows))
        readings = Readings(scheduler, AdapterDesk(self._engine.adapters), self._rows)
        metrics = TritonMetrics(triton.MetricFamily, model)
        self._responder = Responder(
            lambda number: self._loop.cancel(number),
            lambda answer, error: self._adapters.told(answer.asked, error),
            lambda responder: metrics.publish(readings.read(responder)),
        )
        opening.callback(self._responder.close)
        self._loop = opening.enter_context(EngineLoop(scheduler, self._responder.put))
        # Grammars are compiled there: requests without one go on meanwhile.
        self._threads = opening.enter_context(ThreadPoolExecutor(2, "trt-lora-submit"))

    def _take(self, request: Any, reply: "_Sender") -> None:
        asked = read_asked({t.name(): t.as_numpy() for t in request.inputs()}, request.parameters())
        if asked.streams and not self._is_decoupled:
            raise ConfigError("stream is true, but the model's configuration has decoupled: false")
        sampling = sampling_from(asked.sampling, self._sampling, self._settings.max_logprobs)
        self._check_queue()
        prompt, adapter = self._prompt(asked), self._adapters.name(asked)
        accept = partial(self._accept, asked, reply)
        submit = partial(self._loop.submit, prompt, sampling, adapter=adapter, on_requests=accept)
        if sampling.structured_outputs is None:
            submit()
        else:
            self._threads.submit(_reported, reply, submit)

    def _check_queue(self) -> None:
        bound = self._settings.max_queue
        most = self._rows + (_QUEUED * self._rows if bound is None else bound)
        if len(self._responder.answers) >= most:
            raise ConfigError(f"{most} requests run or wait, and no more are taken; try again")

    def _prompt(self, asked: Asked) -> Prompt:
        """Text is what a completion begins with, without a template, as for vLLM's backend."""
        if not isinstance(asked.prompt, str):
            return asked.prompt
        if self._tokenizer is None:
            raise ConfigError("text_input needs a tokenizer, and the engine has none: input_ids")
        return self._tokenizer.encode_text(asked.prompt, special_tokens=True)

    def _accept(self, asked: Asked, reply: "_Sender", requests: Sequence[Request]) -> None:
        for request in requests:
            answer = TritonAnswer(asked, reply, request, self._tokenizer)
            self._responder.answers[request.id] = answer


class _Sender:
    """The sender of one request."""

    def __init__(self, sender: Any, shape: tuple[int, ...]) -> None:
        """Take it, and the shape of outputs: with a dimension for a batch of one, or without."""
        self._sender, self._shape = sender, shape

    def send(self, outputs: Mapping[str, Array], *, is_last: bool) -> None:
        """See `TritonReply`."""
        tensors = [triton.Tensor(name, a.reshape(self._shape)) for name, a in outputs.items()]
        flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        self._sender.send(triton.InferenceResponse(tensors), flags=flags)

    def end(self) -> None:
        """See `TritonReply`."""
        self._sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, message: str) -> None:
        """See `TritonReply`."""
        response = triton.InferenceResponse([], error=triton.TritonError(message))
        self._sender.send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """See `TritonReply`."""
        return bool(self._sender.is_cancelled())


def _reported(reply: _Sender, do: Callable[[], object]) -> None:
    """Do something for one request, whose error is no other's."""
    try:
        do()
    except Exception as error:
        fail(reply, error)
