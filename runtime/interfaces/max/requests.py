"""MAX's requests to load and unload adapters while an engine serves, over ZeroMQ.

A message is MessagePack of [request id, {"operation", "lora_name", "lora_path"}], its answer of
[request id, {"status", "message"}]. The id is the client's, of any kind, and comes back as it was.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trt_lora.plugins.messages import listed, shown
from trt_lora.runtime.interfaces.max.request_sockets import RequestSockets
from trt_lora.runtime.interfaces.max.status import LoRAOperation, LoRAOutcome, LoRAStatus

_LOG = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 10  # with its id; a larger one is refused
MOST_WAITING = 64  # requests under way, and answers that nobody has fetched
TIMEOUT_S = 30.0  # an operation that takes longer is answered before it has ended

_NO_ID = msgspec.Raw(msgspec.msgpack.encode(""))  # of an answer to what has no readable id


class LoRARequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """MAX's `LoRARequest`."""

    operation: LoRAOperation
    lora_name: str
    lora_path: str | None = None


_ENVELOPE = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw])
_REQUEST = msgspec.msgpack.Decoder(LoRARequest)
_MALFORMED = (msgspec.MsgspecError, RecursionError, ValueError)


@dataclass(frozen=True)
class _Waiting:
    request_id: msgspec.Raw
    operation: LoRAOperation
    future: Future[LoRAOutcome]
    since: float  # seconds, of time.monotonic


class LoRARequestProcessor:
    """Takes requests in, has a thread of its own load and unload, and answers each once."""

    def __init__(
        self,
        load: Callable[[str, str], LoRAOutcome],
        unload: Callable[[str], LoRAOutcome],
        zmq_endpoint_base: str,
        allowed_roots: Iterable[str | Path],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Open the endpoints.

        Args:
            load: loads an adapter under a name, from a path; a refusal is an outcome.
            unload: forgets the adapter of a name.
            zmq_endpoint_base: "ipc://" and an absolute path, or "inproc://" and a name.
            allowed_roots: folders that adapters may come from; none of them allows no load.
            timeout_s: seconds after which an operation is answered though it goes on.

        Raises:
            ConfigError: the base is no such address, or what lies there is no socket.
        """
        self._sockets = RequestSockets(zmq_endpoint_base, MOST_WAITING)
        self._load, self._unload, self._timeout_s = load, unload, timeout_s
        # Links are resolved now, so that a later one changes nothing.
        self._roots = tuple(os.path.realpath(folder) for folder in allowed_roots)
        self._worker = ThreadPoolExecutor(1, "lora-requests")
        self._waiting: deque[_Waiting] = deque()
        self._answers: deque[bytes] = deque(maxlen=MOST_WAITING)

    def process_lora_requests(self) -> None:
        """Take requests in and answer those that are done; waits for neither."""
        for _ in range(MOST_WAITING - len(self._waiting)):
            if (frames := self._sockets.receive()) is None:
                break
            self._take(frames)
        now = time.monotonic()
        for waiting in list(self._waiting):
            if waiting.future.done() or now - waiting.since > self._timeout_s:
                self._waiting.remove(waiting)
                self._answer(waiting.request_id, self._outcome(waiting))
        while self._answers and self._sockets.send(self._answers[0]):
            self._answers.popleft()

    def close(self) -> None:
        """Close the endpoints; an operation under way ends first, later ones are not begun."""
        self._worker.shutdown(cancel_futures=True)
        self._sockets.close()

    def _take(self, frames: list[bytes]) -> None:
        """Begin what a message asks for, or answer why not."""
        request_id = _NO_ID
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames, expected 1")
            sent_id, body = _ENVELOPE.decode(frames[0])
            msgspec.msgpack.decode(sent_id)  # it goes back as it is, so it has to be readable
            request_id = msgspec.Raw(bytes(sent_id))
            if len(frames[0]) > MAX_REQUEST_BYTES:
                raise ValueError(f"{len(frames[0])} bytes, expected at most {MAX_REQUEST_BYTES}")
            request = _REQUEST.decode(body)
        except _MALFORMED as error:
            message = f"this is no request: {error!s:.500}"
            self._answer(request_id, LoRAOutcome(LoRAStatus.UNSPECIFIED_ERROR, message))
            return
        future = self._worker.submit(self._run, request)
        self._waiting.append(_Waiting(request_id, request.operation, future, time.monotonic()))

    def _run(self, request: LoRARequest) -> LoRAOutcome:
        if request.operation is LoRAOperation.UNLOAD:
            return self._unload(request.lora_name)
        path = request.lora_path or ""
        if not os.path.isabs(path) or "\0" in path:
            message = f"the path of an adapter is {shown(path)}; expected an absolute one"
            return LoRAOutcome(LoRAStatus.LOAD_INVALID_PATH, message)
        real = os.path.realpath(path)  # this is opened, and no link is followed again
        if not any(Path(real).is_relative_to(root) for root in self._roots):
            folders = listed(self._roots) or "no folder"
            message = f"{shown(path)} is outside of what requests may load: {folders}"
            return LoRAOutcome(LoRAStatus.LOAD_INVALID_PATH, message)
        return self._load(request.lora_name, real)

    def _outcome(self, waiting: _Waiting) -> LoRAOutcome:
        is_load = waiting.operation is LoRAOperation.LOAD
        status = LoRAStatus.LOAD_ERROR if is_load else LoRAStatus.UNLOAD_ERROR
        if not waiting.future.done():
            message = f"it takes longer than {self._timeout_s:g} s and goes on; ask again"
            return LoRAOutcome(status, message)
        error = waiting.future.exception()
        if error is None:
            return waiting.future.result()
        _LOG.error("a request failed", exc_info=error)  # a defect, which the client need not see
        return LoRAOutcome(status, f"{type(error).__name__}; the server's log says more")

    def _answer(self, request_id: msgspec.Raw, outcome: LoRAOutcome) -> None:
        if len(self._answers) == MOST_WAITING:
            _LOG.warning("nobody fetches the answers to LoRA requests; the oldest is dropped")
        self._answers.append(msgspec.msgpack.encode((request_id, outcome)))  # MAX's `LoRAResponse`
