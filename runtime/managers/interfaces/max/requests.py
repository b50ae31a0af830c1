"""MAX's requests to load and unload adapters while an engine serves, over ZeroMQ.

A message is MessagePack of [request id, {"operation", "lora_name", "lora_path"}], its answer of
[request id, {"status", "message"}]. As in MAX, who sends binds and who receives connects: requests
come from `{base}-lora_request`, which the client binds, and answers go to `{base}-lora_response`.
Who can write to the folder of these sockets can load and unload: make it its user's alone.
"""

import logging
import os
import stat
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.managers.interfaces.allowed_roots import AllowedRoots
from trt_lora.runtime.managers.interfaces.max.status import (
    LoRAOperation,
    LoRAOperations,
    LoRAOutcome,
    LoRAStatus,
)

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ConfigError(
        f"requests over ZeroMQ need {error.name}; install it with: pip install 'trt-lora[requests]'"
    ) from error

_LOG = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 10  # larger requests are refused in words
MAX_MESSAGE_BYTES = 1 << 20  # ZeroMQ ends a connection that sends larger ones
MOST_WAITING = 64  # requests under way, and answers that nobody has fetched
TIMEOUT_S = 30.0  # an operation that takes longer is answered before it has ended

_NO_ID = msgspec.Raw(msgspec.msgpack.encode(""))  # of an answer to what has no readable id


class MaxLoRARequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """MAX's `LoRARequest`."""

    operation: LoRAOperation
    lora_name: str
    lora_path: str | None = None


class MaxLoRAResponse(msgspec.Struct, frozen=True):
    """MAX's `LoRAResponse`."""

    status: LoRAStatus
    message: str


_ENVELOPE = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw])
_REQUEST = msgspec.msgpack.Decoder(MaxLoRARequest)
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
        operations: LoRAOperations,
        zmq_endpoint_base: str,
        allowed_roots: Iterable[str | Path],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Open the endpoints.

        Args:
            operations: who loads and unloads.
            zmq_endpoint_base: "ipc://" and an absolute path, or "inproc://" and a name.
            allowed_roots: folders that adapters may come from; none of them allows no load.
            timeout_s: seconds after which an operation is answered though it goes on.

        Raises:
            ConfigError: the base is no such address, or what lies there is no socket.
        """
        requests, responses = _endpoints(zmq_endpoint_base)
        self._operations, self._timeout_s = operations, timeout_s
        self._roots = AllowedRoots.of(allowed_roots)
        self._worker = ThreadPoolExecutor(1, "lora-requests")
        self._waiting: deque[_Waiting] = deque()
        self._answers: deque[bytes] = deque(maxlen=MOST_WAITING)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._requests, self._responses = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        try:
            self._open(requests, responses)
        except BaseException:
            self.close()
            raise

    def process_lora_requests(self) -> None:
        """Take requests in and answer those that are done; waits for neither."""
        for _ in range(MOST_WAITING - len(self._waiting)):
            if (frames := self._receive()) is None:
                break
            self._take(frames)
        now = time.monotonic()
        for waiting in list(self._waiting):
            if waiting.future.done() or now - waiting.since > self._timeout_s:
                self._waiting.remove(waiting)
                self._answer(waiting.request_id, self._outcome(waiting))
        self._send()

    def close(self) -> None:
        """Close the endpoints; an operation under way ends first, later ones are not begun."""
        self._worker.shutdown(cancel_futures=True)
        for socket in (self._requests, self._responses):
            socket.close(linger=0)

    def _open(self, requests: str, responses: str) -> None:
        self._requests.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._requests.setsockopt(zmq.RCVHWM, MOST_WAITING)
        self._responses.setsockopt(zmq.SNDHWM, MOST_WAITING)
        try:
            self._requests.connect(requests)
            self._responses.bind(responses)
        except zmq.ZMQError as error:
            raise ConfigError(f"{responses} cannot be opened: {error}") from error
        if responses.startswith("ipc://"):
            os.chmod(responses.removeprefix("ipc://"), stat.S_IRUSR | stat.S_IWUSR)

    def _receive(self) -> list[bytes] | None:
        try:
            return [bytes(frame) for frame in self._requests.recv_multipart(zmq.NOBLOCK)]
        except zmq.Again:
            return None

    def _take(self, frames: list[bytes]) -> None:
        """Begin what a message asks for, or answer why not."""
        request_id = _NO_ID
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames, expected 1")
            request_id, body = _ENVELOPE.decode(frames[0])
            request_id = msgspec.Raw(bytes(request_id))
            if len(frames[0]) > MAX_REQUEST_BYTES:
                raise ValueError(f"{len(frames[0])} bytes, expected at most {MAX_REQUEST_BYTES}")
            request = _REQUEST.decode(body)
        except _MALFORMED as error:
            message = f"this is no request: {error!s:.500}"
            self._answer(request_id, LoRAOutcome(LoRAStatus.UNSPECIFIED_ERROR, message))
            return
        future = self._worker.submit(self._run, request)
        self._waiting.append(_Waiting(request_id, request.operation, future, time.monotonic()))

    def _run(self, request: MaxLoRARequest) -> LoRAOutcome:
        if request.operation is LoRAOperation.UNLOAD:
            return self._operations.unload(request.lora_name)
        try:
            path = self._roots.resolve(request.lora_path or "")
        except AdapterError as error:
            return LoRAOutcome(LoRAStatus.LOAD_INVALID_PATH, str(error))
        return self._operations.load(request.lora_name, str(path))

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
        response = MaxLoRAResponse(outcome.status, outcome.message)
        self._answers.append(msgspec.msgpack.encode((request_id, response)))

    def _send(self) -> None:
        while self._answers:
            try:
                self._responses.send(self._answers[0], zmq.NOBLOCK)
            except zmq.Again:  # nobody is connected, or does not read
                return
            self._answers.popleft()


def _endpoints(base: str) -> tuple[str, str]:
    """The endpoints of requests and of responses."""
    scheme, _, place = base.partition("://")
    if scheme not in ("ipc", "inproc") or not place or "\0" in base:
        raise ConfigError(
            f"zmq_endpoint_base is {shown(base)}; expected ipc:// and an absolute path, or "
            "inproc:// and a name: no endpoint is open to other machines"
        )
    requests, responses = f"{base}-lora_request", f"{base}-lora_response"
    if scheme == "ipc":
        _check_ipc(Path(responses.removeprefix("ipc://")))
    return requests, responses


def _check_ipc(path: Path) -> None:
    """Refuse a place where a socket cannot be made, or where one would replace a file."""
    if not path.is_absolute() or not path.parent.is_dir():
        raise ConfigError(f"{path} is no absolute path in a folder that exists")
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(f"{path} is longer than {zmq.IPC_PATH_MAX_LEN} bytes; take a shorter one")
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{path} is no socket, and one would take its place; remove it")
