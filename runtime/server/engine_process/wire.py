"""What the web's process and the engine's say to each other: MessagePack in frames."""

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from trt_lora.plugins import errors
from trt_lora.plugins.errors import BackendError, LoRAError
from trt_lora.runtime.generation.token import Token

_LENGTH = struct.Struct("<I")
_READ = 1 << 18  # bytes at a time


class Open(msgspec.Struct, array_like=True, tag=True):
    """The first command: which engine, and the fields of its `ServingConfig` and `StoreConfig`."""

    directory: str
    backend: str
    serving: dict[str, Any]
    store: dict[str, Any]


class Submit(msgspec.Struct, array_like=True, tag=True):
    """Answer prompts, `n` times each; all of them, or none."""

    call: int
    prompts: list[list[int]]
    max_tokens: list[int]  # of the answers to each
    sampling: dict[str, Any]  # the other fields of `SamplingParams` that are not at their defaults
    adapter: str | None
    blend: dict[str, float]  # instead of one adapter, a weighted sum
    client: str | None
    salt: str | None


class Cancel(msgspec.Struct, array_like=True, tag=True):
    """Let requests go."""

    numbers: list[int]


class Ask(msgspec.Struct, array_like=True, tag=True):
    """Call a method of `AdapterDesk`."""

    call: int
    what: str
    options: dict[str, Any]


class Close(msgspec.Struct, array_like=True, tag=True):
    """The last command: end, at once."""


Command = Open | Submit | Cancel | Ask | Close


class WireError(msgspec.Struct, array_like=True):
    """An error on its way: the name of its class, and its message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "WireError":
        """Return what is said of an error; of one that is no LoRAError no more than its class."""
        is_ours = isinstance(error, LoRAError)
        text = str(error) if is_ours else f"the engine failed: {type(error).__name__}"
        return cls(type(error).__name__, text)

    def error(self) -> LoRAError:
        """Return the error again."""
        kind = getattr(errors, self.kind, BackendError)
        found: LoRAError = kind(self.message)
        return found


class Accepted(msgspec.Struct, array_like=True, tag=True):
    """The numbers of one prompt's requests, before any of their tokens."""

    call: int
    numbers: tuple[int, ...]


class Answer(msgspec.Struct, array_like=True, tag=True):
    """What a call has returned; of `Submit` that all prompts are accepted, of `Open` its call 0."""

    call: int
    value: Any = None


class Failed(msgspec.Struct, array_like=True, tag=True):
    """What a call has raised."""

    call: int
    error: WireError


class RequestTimes(msgspec.Struct, array_like=True):
    """How long a request took so far, measured where its tokens are made; in seconds."""

    version: int | None  # of its adapter, once it has a row
    cached_tokens: int  # of its prompt, that were not run: other requests had begun with them
    queue_s: float  # until it had a row
    load_s: float  # of those, until its adapter had come
    prefill_s: float  # from its row to its first token
    decode_s: float  # from that one to its last


class Step(msgspec.Struct, array_like=True, tag=True):
    """What one step has given, and how many requests have a row and wait for one."""

    tokens: list[Token]
    failed: dict[int, WireError]
    running: int = 0
    waiting: int = 0
    times: dict[int, RequestTimes] = {}  # of those that have their first token, or have ended


Event = Accepted | Answer | Failed | Step

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def framed(message: Command | Event) -> bytes:
    """Return a message as a frame: its length in four bytes, and MessagePack."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._held = bytearray()

    def events(self, data: bytes) -> list[Event]:
        """Return the events that are whole now."""
        return [_events.decode(body) for body in self._bodies(data)]

    def commands(self, data: bytes) -> list[Command]:
        """Return the commands that are whole now."""
        return [_commands.decode(body) for body in self._bodies(data)]

    def _bodies(self, data: bytes) -> Iterator[bytes]:
        self._held += data
        start = 0
        while len(self._held) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held, start)
            end = start + _LENGTH.size + length
            if len(self._held) < end:
                break
            yield bytes(self._held[start + _LENGTH.size : end])
            start = end
        del self._held[:start]


class EngineChannel:
    """The engine's end: commands come one by one; events leave in a thread that may wait."""

    def __init__(self, connection: socket.socket) -> None:
        """Take the socket; the web's process has the other end."""
        self._connection = connection
        self._events = queue.SimpleQueue[Event | None]()
        self._writer = threading.Thread(target=self._write, name="trt-lora-events", daemon=True)
        self._writer.start()

    def send(self, event: Event) -> None:
        """Let an event leave; any thread may, and none waits for the other end."""
        self._events.put(event)

    def commands(self) -> Iterator[Command]:
        """Return commands until the other end is closed."""
        frames = Frames()
        while data := self._connection.recv(_READ):
            yield from frames.commands(data)

    def close(self) -> None:
        """Send what is left, and close."""
        self._events.put(None)
        self._writer.join()
        self._connection.close()

    def _write(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._connection.sendall(framed(event))
        except OSError:  # the web's process is gone; the reader sees it too
            return
