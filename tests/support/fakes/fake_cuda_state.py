"""State of the fake CUDA driver: blocks, streams, events, graphs, and the rules it checks."""

import functools
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 256
DEVICE_BASE = 1 << 60  # no process has memory there
GARBAGE = 0xFF  # as float a NaN, as int -1
MAX_PITCH = 2**31 - 1  # of copies in two dimensions


class Violation(AssertionError):  # a broken rule, not an error of a user
    """A rule of CUDA was broken."""


class Status(IntEnum):
    """The part of `cudaError_t` that is needed."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class CopyKind(IntEnum):
    """The part of `cudaMemcpyKind` that is needed."""

    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class CaptureMode(IntEnum):
    """What a capture forbids."""

    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


SUCCESS = Status.cudaSuccess
TEXTS = {
    Status.cudaErrorInvalidValue: b"invalid argument",
    Status.cudaErrorMemoryAllocation: b"out of memory",
    Status.cudaErrorInsufficientDriver: (
        b"CUDA driver version is insufficient for CUDA runtime version"
    ),
    Status.cudaErrorInvalidDevice: b"invalid device ordinal",
    Status.cudaErrorNoDevice: b"no CUDA-capable device is detected",
    Status.cudaErrorIllegalAddress: b"an illegal memory access was encountered",
    Status.cudaErrorStreamCaptureUnsupported: b"operation not permitted when stream is capturing",
    Status.cudaErrorStreamCaptureInvalidated: (
        b"operation failed due to a previous error during capture"
    ),
}


class Stream:
    """What `cudaStreamCreate` returns: no int, but int() takes it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __int__(self) -> int:
        """Return the handle."""
        return self._handle


@dataclass(eq=False)
class Block:
    """One allocation, on the device or pinned on the host."""

    address: int
    memory: Bytes
    device: int | None = None  # the GPU, for memory of one
    home: int | None = None  # the only stream that may use it, until that stream was waited for
    freed: bool = False

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.memory.size


@dataclass(eq=False)
class Work:
    """Something enqueued on a stream."""

    what: str
    stream: int
    blocks: Sequence[Block]
    run: Callable[[], None]
    to_host: bool = False
    owner: object = None
    done: bool = False
    thread: int = field(default_factory=threading.get_ident)  # that has enqueued it


@dataclass(eq=False)
class Event:
    """What `cudaEventCreateWithFlags` returns; `last` is the work it waits for."""

    device: int = 0
    last: Work | None = None
    destroyed: bool = False


@dataclass(eq=False)
class Graph:
    """A captured graph, or (launchable) what it was made into."""

    works: Sequence[Work]
    launchable: bool = False
    destroyed: bool = False
    stale: str = ""  # why it may not be launched any more


@dataclass
class Copy:
    """One copy that was asked for."""

    target: int
    source: int
    nbytes: int
    kind: CopyKind
    stream: int
    source_is_pinned: bool = False


class FakeCudaState(ModuleType):
    """What the functions of `FakeCuda` change, what tests ask of it, and how they make it fail."""

    cudaMemcpyKind = CopyKind
    cudaStreamCaptureMode = CaptureMode
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2
    _made = 0  # so that no two GPUs have an address in common

    def __init__(self, devices: int = 1) -> None:
        super().__init__("cuda.bindings.runtime")
        self.devices = devices
        self.hurries = False  # whoever waits for an event finds what is behind it done too
        self._thread = threading.local()
        self._lock = threading.RLock()  # calls of several threads come one after another
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.copies: list[Copy] = []
        self.violations: list[str] = []
        self.last_error = SUCCESS
        self.graphs: list[Graph] = []  # all that were ever made
        self._events: list[Event] = []
        self._captures: dict[int, list[Work]] = {}  # by stream
        self._invalid: set[int] = set()  # streams whose capture has failed
        self._failures: dict[str, Status | RuntimeError] = {}
        self._failing_call = -1
        self._fatal = ""  # the function whose next call finds the device lost
        self._lost: Status | None = None
        self._device: list[Block] = []
        self._pinned: list[Block] = []
        FakeCudaState._made += 1
        self._base = self._next_address = DEVICE_BASE + (FakeCudaState._made << 32)
        self._streams: dict[int, list[Work]] = {-index: [] for index in range(max(devices, 1))}
        self._homes: dict[int, int] = {}  # GPU of each stream that was ever created
        self._next_stream = 0x5000

    # What tests ask and arrange.

    @property
    def current_device(self) -> int:
        """The GPU of this thread: 0 until it chooses another."""
        return int(getattr(self._thread, "device", 0))

    @current_device.setter
    def current_device(self, index: int) -> None:
        self._thread.device = index

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not (name.startswith("cuda") or name == "enqueue") or not inspect.ismethod(found):
            return found

        @functools.wraps(found)
        def in_turn(*args: Any) -> Any:
            with self._lock:
                return found(*args)

        return in_turn

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what `import cuda.bindings.runtime` finds."""
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", self)

    def fail(self, function: str, reason: Status | RuntimeError) -> None:
        """Let the next call of `function` fail: with a status, or as cuda-python 12 does."""
        self._failures[function] = reason

    def fail_call(self, index: int) -> None:
        """Let the call with that number, from the first, fail for lack of memory."""
        self._failing_call = index

    def lose_device_at(self, function: str) -> None:
        """Let the next call of `function` and all after it fail, as when a kernel crashed."""
        self._fatal = function

    def names(self) -> list[str]:
        """Names of the functions called, in order."""
        return [name for name, _ in self.calls]

    def live_blocks(self) -> list[Block]:
        """Memory that is not freed, of the device and of the host."""
        return [block for block in (*self._device, *self._pinned) if not block.freed]

    def live_device_bytes(self) -> int:
        """Memory of the device that is not freed."""
        return sum(block.memory.size for block in self._device if not block.freed)

    def live_streams(self) -> list[int]:
        """Streams that were created and not destroyed."""
        return [handle for handle in self._streams if handle > 0]

    def live_handles(self) -> list[Event | Graph]:
        """Events and graphs that were made and not destroyed."""
        items: list[Event | Graph] = [*self._events, *self.graphs]
        return [item for item in items if not item.destroyed]

    def pending(self, owner: object) -> list[str]:
        """What `owner` has enqueued and nobody has waited for."""
        queues = [] if self._lost else self._streams.values()
        return [work.what for queue in queues for work in queue if work.owner is owner]

    def pending_works(self) -> int:
        """How many works on streams that were created nobody has waited for."""
        return sum(len(queue) for stream, queue in self._streams.items() if stream > 0)

    def check(self) -> None:
        """Raise AssertionError if a rule was broken or something was not given back."""
        if self.live_blocks():
            gc.collect()  # an exception that a test has caught keeps frames alive
        assert not self.violations
        assert self._lost or not [hex(block.address) for block in self.live_blocks()]
        assert self._lost or not self.live_streams()
        assert self._lost or not self.live_handles()
        assert not self._captures

    # What the fake TensorRT needs.

    def violate(self, message: str) -> NoReturn:
        """Note and raise a broken rule."""
        self.violations.append(message)
        raise Violation(message)

    def blocks_at(self, address: int, nbytes: int, what: str) -> list[Block]:
        """The live device memory [address, address + nbytes); nothing for no bytes."""
        if not nbytes:
            return []
        for block in self._device:
            if block.address <= address and address + nbytes <= block.end:
                if block.freed:
                    self.violate(f"{what}: memory at {address:#x} is used after it was freed")
                return [block]
        self.violate(f"{what}: {nbytes} bytes at {address:#x} are no device memory")

    def view(self, address: int, nbytes: int) -> Bytes:
        """The bytes at a device address, as a kernel sees them."""
        for block in self.blocks_at(address, nbytes, "a kernel"):
            start = address - block.address
            return block.memory[start : start + nbytes]
        return np.empty(0, np.uint8)

    def enqueue(self, work: Work) -> None:
        """Put work on its stream."""
        work.stream = self._on(work.stream)
        queue = self._queue(work.what, work.stream)
        for block in work.blocks:
            self._check_place(work.what, block, work.stream)
            if block.home not in (None, work.stream):
                self.violate(
                    f"{work.what} on stream {work.stream}: nobody waited for stream {block.home}, "
                    "on which its memory was allocated"
                )
        if work.stream in self._captures:
            self._captures[work.stream].append(work)
        else:
            queue.append(work)

    def device_of(self, stream: Any) -> int:
        """Return the GPU of a stream, for the default stream that of this thread."""
        handle = self._on(stream)
        return self._homes[handle] if handle > 0 else -handle

    def is_captured(self, stream: int) -> bool:
        """Whether work on the stream is captured now."""
        return stream in self._captures

    # NVIDIA's functions.

    def cudaGetDeviceCount(self) -> tuple[Status, int | None]:
        """How many GPUs there are."""
        status = self._enter("cudaGetDeviceCount")
        return status, None if status else self.devices

    def cudaGetDevice(self) -> tuple[Status, int | None]:
        """Return the GPU that this thread uses."""
        status = self._enter("cudaGetDevice")
        return status, None if status else self.current_device

    def cudaSetDevice(self, device: int) -> tuple[Status]:
        """Choose the GPU that this thread uses."""
        status = self._enter("cudaSetDevice", device)
        if not status and device not in range(self.devices):
            status = self.last_error = Status.cudaErrorInvalidDevice
        if status:
            return (status,)
        self.current_device = device
        return (SUCCESS,)

    def cudaGetErrorString(self, error: Status) -> tuple[Status, bytes]:
        """Explain a status; asking is no work for the GPU and is not recorded."""
        return SUCCESS, TEXTS[error]

    def cudaGetLastError(self) -> tuple[Status]:
        """Return the last error and forget it; asking is no work for the GPU."""
        error, self.last_error = self.last_error, self._lost or SUCCESS
        return (error,)

    def _do_next(self, queue: list[Work]) -> None:
        work = queue.pop(0)
        work.run()
        work.done = True

    def _do_up_to(self, last: Work | None) -> None:
        while last and not last.done:
            self._do_next(self._streams[last.stream])
        while last and self.hurries and self._streams.get(last.stream):
            self._do_next(self._streams[last.stream])

    def _check_alive(self, what: str, item: Event | Graph) -> None:
        if item.destroyed:
            self.violate(f"{what}: the {type(item).__name__.lower()} was destroyed")

    def _enter(self, function: str, *args: Any) -> Status:
        if len(self.calls) == self._failing_call:
            self.fail(function, Status.cudaErrorMemoryAllocation)
        self.calls.append((function, args))
        if function == self._fatal:
            self._lost = Status.cudaErrorIllegalAddress
        reason = self._failures.pop(function, self._lost or SUCCESS)
        if isinstance(reason, RuntimeError):
            raise reason
        self.last_error = reason or self.last_error
        waits_for = self._on(args[0]) if function == "cudaStreamSynchronize" else None
        for handle, queue in self._streams.items():
            own = threading.get_ident()
            unread = [w for w in queue if w.to_host and w.thread == own and waits_for != handle]
            if unread and not reason:
                queue[:] = [work for work in queue if work not in unread]  # the host moved on
                self.violate(f"{function} before a copy to the host on stream {handle} was done")
        return reason

    def _on(self, stream: Any) -> int:
        """A stream as a key: the default stream of GPU n is -n, for each GPU has one."""
        return int(stream) or -self.current_device

    def _check_place(self, what: str, block: Block, stream: int) -> None:
        device = self.device_of(stream)
        if block.device not in (None, device):
            self.violate(f"{what} on a stream of GPU {device}: its memory is of GPU {block.device}")

    def _queue(self, what: str, stream: int) -> list[Work]:
        if -self.devices < stream < 0:
            self._streams.setdefault(stream, [])
        if stream not in self._streams:
            self.violate(f"{what}: there is no stream {stream}, or it was destroyed")
        return self._streams[stream]

    def _whole(self, blocks: Iterable[Block], pointer: int, what: str) -> Block:
        block = next((block for block in blocks if block.address == pointer), None)
        if block is None:
            self.violate(f"{what}: {pointer:#x} was never allocated")
        if block.freed:
            self.violate(f"{what}: {pointer:#x} is freed twice")
        return block
