"""A model for Triton's Python backend: requests name adapters and share one `Scheduler`."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # pyright: ignore[reportMissingImports]

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime import SamplingParams, open_engine


class TritonPythonModel:
    """Puts requests into a queue; one thread lets them join the batch and sends their tokens."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine, register the folder's adapters by their names, and start the thread."""
        parameters = json.loads(args["model_config"])["parameters"]
        engine_path, folder = (parameters[k]["string_value"] for k in ("engine", "adapters"))
        self._open = ExitStack()
        engine = self._open.enter_context(open_engine(engine_path))
        for path in sorted(Path(folder).iterdir()):
            engine.adapters.register(path.name, path)
        self._scheduler = engine.serve()
        self._incoming: SimpleQueue[Any] = SimpleQueue()
        self._senders: dict[int, Any] = {}  # by the scheduler's number
        self._thread = Thread(target=self._serve, name="trt-lora")
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; their answers come as they are made."""
        for request in requests:
            self._incoming.put(request)

    def finalize(self) -> None:
        """Stop: Triton calls this when every request is answered."""
        self._incoming.put(None)
        self._thread.join()
        self._open.close()

    def _serve(self) -> None:
        while True:
            while not self._scheduler or not self._incoming.empty():
                if (request := self._incoming.get()) is None:
                    return
                self._submit(request)
            self._step()

    def _submit(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            ids = triton.get_input_tensor_by_name(request, "input_ids").as_numpy().tolist()
            name, most = (_optional(request, key) for key in ("lora_name", "max_tokens"))
            adapter = None if name is None else name.decode()
            sampling = None if most is None else SamplingParams(max_tokens=int(most), temperature=0)
            number = self._scheduler.submit(ids, sampling, adapter=adapter)
        except (LoRAError, UnicodeDecodeError) as error:
            _send_error(sender, error)
        else:
            self._senders[number] = sender

    def _step(self) -> None:
        try:
            answers = self._scheduler.step()
        except Exception as error:  # the engine's: nobody may wait for ever
            for number in list(self._senders):
                self._scheduler.cancel(number)
                _send_error(self._senders.pop(number), error)
            return
        for number, token in answers.tokens.items():
            is_last = token.finish_reason is not None
            sender = self._senders.pop(number) if is_last else self._senders[number]
            _send_token(sender, token.token_id, is_last=is_last)
        for number, failure in answers.failed.items():
            _send_error(self._senders.pop(number), failure)
        if not answers.tokens and not answers.failed:
            time.sleep(0.001)  # everyone waits for an adapter that is being read


def _optional(request: Any, name: str) -> Any:
    tensor = triton.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().item()


def _send_token(sender: Any, token_id: int | None, *, is_last: bool) -> None:
    flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
    if token_id is None:  # a stop token, which is no part of the answer
        sender.send(flags=flags)
        return
    tensor = triton.Tensor("token_id", np.array([token_id], np.int64))
    sender.send(triton.InferenceResponse([tensor]), flags=flags)


def _send_error(sender: Any, error: BaseException) -> None:
    response = triton.InferenceResponse([], error=triton.TritonError(str(error)))
    sender.send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
