"""MAX's two endpoints over ZeroMQ: requests come in, answers go out; neither call waits.

As in MAX, who sends binds and who receives connects: requests come from `{base}-lora_request`,
which the client binds, and answers go to `{base}-lora_response`. Who can write to the folder of
these sockets can load and unload: make it its user's alone.
"""

import contextlib
import os
import stat
import time
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown

MAX_MESSAGE_BYTES = 1 << 20  # a connection that brings a larger message ends
_RETRY_S = 0.1  # by then ZeroMQ has said whether it connects again itself


class RequestSockets:
    """A PULL socket that is connected and a PUSH socket that is bound, for one thread."""

    def __init__(self, base: str, most_waiting: int) -> None:
        """Open both.

        Args:
            base: "ipc://" and an absolute path, or "inproc://" and a name.
            most_waiting: messages that either socket holds.

        Raises:
            ConfigError: the base is no such address, or what lies there is no socket.
        """
        self._endpoint, answers = _endpoints(base)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._requests, self._answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._requests.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._requests.setsockopt(zmq.RCVHWM, most_waiting)
        self._answers.setsockopt(zmq.SNDHWM, most_waiting)
        self._events = self._requests.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        )
        self._cut_off: float | None = None  # when a connection ended, in time.monotonic's seconds
        try:
            self._requests.connect(self._endpoint)
            self._answers.bind(answers)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{answers} cannot be opened: {error}") from error
        if answers.startswith("ipc://"):
            os.chmod(answers.removeprefix("ipc://"), stat.S_IRUSR | stat.S_IWUSR)

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message; None if there is none."""
        try:
            return [bytes(frame) for frame in self._requests.recv_multipart(zmq.NOBLOCK)]
        except zmq.Again:
            self._reconnect()
            return None

    def send(self, message: bytes) -> bool:
        """Send a message; False if nobody is connected, or none of them reads."""
        try:
            self._answers.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close both; what was not sent is lost."""
        self._requests.disable_monitor()
        for socket in (self._events, self._requests, self._answers):
            socket.close(linger=0)

    def _reconnect(self) -> None:
        """Connect again after a message too large; ZeroMQ itself does after any other end."""
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            is_over = event == zmq.EVENT_DISCONNECTED
            self._cut_off = time.monotonic() if is_over else None
        if self._cut_off is not None and time.monotonic() - self._cut_off > _RETRY_S:
            self._cut_off = None
            with contextlib.suppress(zmq.ZMQError):  # it knows the endpoint no more
                self._requests.disconnect(self._endpoint)
            self._requests.connect(self._endpoint)


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
