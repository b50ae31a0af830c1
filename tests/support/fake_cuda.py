"""A CUDA runtime without a GPU: a strict stand-in for the module `cuda.bindings.runtime`.

* Device addresses are no host addresses: code that reads device memory in place crashes.
* Work happens when its stream is waited for, and not before. Streams promise each other no order,
  as with the streams of torch and with per-thread default streams.
* Memory, streams and events are of the GPU that was current when they were made, and used there;
  a thread begins on GPU 0, and each GPU has a default stream of its own.
* Memory is garbage before it is written and after it is freed, and no address is used twice.
* A copy from pinned memory finds there what was there when it was enqueued.
* What is enqueued while a stream is captured is part of a graph, and happens when that is launched;
  a graph is launched only while all memory is there that it uses.
* An error stays until somebody asks for the last one.
* What breaks a rule raises `Violation` and is kept in `violations`, also when a finalizer did it.
"""

# functions and constants have NVIDIA's names
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 256
DEVICE_BASE = 1 << 60  # no process has memory there
GARBAGE = 0xFF  # as float a NaN, as int -1


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


class FakeCuda(ModuleType):
    """The functions of `cuda.bindings.runtime` that the package uses."""

    cudaMemcpyKind = CopyKind
    cudaStreamCaptureMode = CaptureMode
    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2
    _made = 0  # so that no two GPUs have an address in common

    def __init__(self, devices: int = 1) -> None:
        super().__init__("cuda.bindings.runtime")
        self.devices = devices
        self._thread = threading.local()
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
        FakeCuda._made += 1
        self._base = self._next_address = DEVICE_BASE + (FakeCuda._made << 32)
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

    def cudaPointerGetAttributes(self, ptr: int) -> tuple[Status, SimpleNamespace | None]:
        """Return, of memory, the GPU that it is of."""
        if status := self._enter("cudaPointerGetAttributes", ptr):
            return status, None
        (block,) = self.blocks_at(ptr, 1, "cudaPointerGetAttributes")
        return SUCCESS, SimpleNamespace(device=block.device)

    def cudaGetErrorString(self, error: Status) -> tuple[Status, bytes]:
        """Explain a status; asking is no work for the GPU and is not recorded."""
        return SUCCESS, TEXTS[error]

    def cudaGetLastError(self) -> tuple[Status]:
        """Return the last error and forget it; asking is no work for the GPU."""
        error, self.last_error = self.last_error, self._lost or SUCCESS
        return (error,)

    def cudaMallocAsync(self, size: int, stream: Any) -> tuple[Status, int | None]:
        """Allocate device memory, which only `stream` may use at first."""
        if status := self._enter("cudaMallocAsync", size, stream):
            return status, None
        self._check_size("cudaMallocAsync", size)
        self._queue("cudaMallocAsync", self._on(stream))
        block = Block(
            self._next_address,
            np.full(size, GARBAGE, np.uint8),
            device=self.current_device,
            home=self._on(stream),
        )
        self._next_address = (block.end // ALIGNMENT + 16) * ALIGNMENT
        self._device.append(block)
        return SUCCESS, block.address

    def cudaFreeAsync(self, pointer: int, stream: Any) -> tuple[Status]:
        """Free device memory, which no other stream may be using."""
        if status := self._enter("cudaFreeAsync", pointer, stream):
            return (status,)
        if DEVICE_BASE < pointer < self._base:
            return (SUCCESS,)  # what an earlier test left when it failed
        self._queue("cudaFreeAsync", self._on(stream))
        block = self._whole(self._device, pointer, "cudaFreeAsync")
        self._check_place("cudaFreeAsync", block, self._on(stream))
        if block.home not in (None, self._on(stream)):
            self.violate(f"cudaFreeAsync: {pointer:#x} is still being allocated on another stream")
        self._free(block, allowed_stream=self._on(stream))
        return (SUCCESS,)

    def cudaMallocHost(self, size: int) -> tuple[Status, int | None]:
        """Allocate pinned host memory."""
        if status := self._enter("cudaMallocHost", size):
            return status, None
        self._check_size("cudaMallocHost", size)
        memory = np.full(size, GARBAGE, np.uint8)
        self._pinned.append(Block(memory.__array_interface__["data"][0], memory))
        return SUCCESS, self._pinned[-1].address

    def cudaFreeHost(self, pointer: int) -> tuple[Status]:
        """Free pinned host memory, which no stream may be using."""
        if status := self._enter("cudaFreeHost", pointer):
            return (status,)
        self._free(self._whole(self._pinned, pointer, "cudaFreeHost"))
        return (SUCCESS,)

    def cudaMemcpyAsync(
        self, target: int, source: int, count: int, kind: CopyKind, stream: Any
    ) -> tuple[Status]:
        """Copy between host and device once the stream is waited for."""
        if status := self._enter("cudaMemcpyAsync", target, source, count, kind, stream):
            return (status,)
        copy = Copy(target, source, count, kind, self._on(stream))
        self.copies.append(copy)
        if kind is CopyKind.cudaMemcpyHostToDevice:
            self._enqueue_upload(copy)
        else:
            self._enqueue_download(copy)
        return (SUCCESS,)

    def cudaMemsetAsync(self, pointer: int, value: int, count: int, stream: Any) -> tuple[Status]:
        """Fill device memory once the stream is waited for."""
        if status := self._enter("cudaMemsetAsync", pointer, value, count, stream):
            return (status,)
        blocks = self.blocks_at(pointer, count, "cudaMemsetAsync")
        view = self.view(pointer, count)
        self.enqueue(Work("cudaMemsetAsync", self._on(stream), blocks, lambda: view.fill(value)))
        return (SUCCESS,)

    def cudaStreamCreate(self) -> tuple[Status, Stream | None]:
        """Make a stream."""
        if status := self._enter("cudaStreamCreate"):
            return status, None
        return SUCCESS, self._new_stream()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Status, Stream | None]:
        """Make a stream that does not wait for the default stream."""
        if status := self._enter("cudaStreamCreateWithFlags", flags):
            return status, None
        if flags != self.cudaStreamNonBlocking:
            self.violate("a stream of ours waits for nobody's default stream")
        return SUCCESS, self._new_stream()

    def cudaStreamDestroy(self, stream: Any) -> tuple[Status]:
        """Destroy a stream on which nothing is left to do."""
        if status := self._enter("cudaStreamDestroy", stream):
            return (status,)
        if self._queue("cudaStreamDestroy", self._on(stream)) or self._on(stream) <= 0:
            self.violate(f"cudaStreamDestroy: stream {self._on(stream)} is in use")
        del self._streams[self._on(stream)]
        return (SUCCESS,)

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Status]:
        """Do the work of a stream."""
        status = self._enter("cudaStreamSynchronize", stream)
        if self._lost:
            return (status,)
        queue = self._queue("cudaStreamSynchronize", self._on(stream))
        if self._on(stream) in self._captures:
            self._invalid.add(self._on(stream))
            self.last_error = Status.cudaErrorStreamCaptureUnsupported
            return (self.last_error,)
        while queue:
            self._do_next(queue)
        for block in self._device:
            if block.home == self._on(stream):
                block.home = None
        return (status,)  # an error of the work: it has ended all the same

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Status, Event | None]:
        """Make an event."""
        if status := self._enter("cudaEventCreateWithFlags", flags):
            return status, None
        self._events.append(Event(self.current_device))
        return SUCCESS, self._events[-1]

    def cudaEventRecord(self, event: Event, stream: Any) -> tuple[Status]:
        """Let the event stand for all that is on the stream now."""
        if status := self._enter("cudaEventRecord", event, stream):
            return (status,)
        self._check_alive("cudaEventRecord", event)
        queue = self._queue("cudaEventRecord", self._on(stream))
        if self.device_of(stream) != event.device:
            self.violate(f"cudaEventRecord: an event of GPU {event.device} and a stream of another")
        event.last = queue[-1] if queue else None
        return (SUCCESS,)

    def cudaEventSynchronize(self, event: Event) -> tuple[Status]:
        """Do the work of a stream up to the event."""
        if status := self._enter("cudaEventSynchronize", event):
            return (status,)
        self._check_alive("cudaEventSynchronize", event)
        self._do_up_to(event.last)
        return (SUCCESS,)

    def cudaStreamWaitEvent(self, stream: Any, event: Event, flags: int) -> tuple[Status]:
        """Let what is enqueued on the stream from now on happen after the event."""
        if status := self._enter("cudaStreamWaitEvent", stream, event, flags):
            return (status,)
        self._check_alive("cudaStreamWaitEvent", event)
        last = event.last
        self.enqueue(Work("a wait", self._on(stream), (), lambda: self._do_up_to(last)))
        return (SUCCESS,)

    def cudaEventDestroy(self, event: Event) -> tuple[Status]:
        """Destroy an event."""
        if status := self._enter("cudaEventDestroy", event):
            return (status,)
        self._check_alive("cudaEventDestroy", event)
        event.destroyed = True
        return (SUCCESS,)

    def cudaStreamBeginCapture(self, stream: Any, mode: CaptureMode) -> tuple[Status]:
        """Capture what is enqueued on the stream from now on, instead of doing it."""
        if status := self._enter("cudaStreamBeginCapture", stream, mode):
            return (status,)
        self._queue("cudaStreamBeginCapture", self._on(stream))
        if mode is not CaptureMode.cudaStreamCaptureModeThreadLocal:
            self.violate(f"a capture in {mode.name} is disturbed by others, or hides mistakes")
        if self._on(stream) <= 0 or self._on(stream) in self._captures:
            self.violate(f"cudaStreamBeginCapture: stream {self._on(stream)} cannot be captured")
        self._captures[self._on(stream)] = []
        return (SUCCESS,)

    def cudaStreamEndCapture(self, stream: Any) -> tuple[Status, Graph | None]:
        """End a capture; also a failing call ends it."""
        status = self._enter("cudaStreamEndCapture", stream)
        if self._on(stream) not in self._captures:
            self.violate(f"cudaStreamEndCapture: stream {self._on(stream)} is not captured")
        works = self._captures.pop(self._on(stream))
        if self._on(stream) in self._invalid:
            self._invalid.discard(self._on(stream))
            status = status or Status.cudaErrorStreamCaptureInvalidated
            self.last_error = status
        if status:
            return status, None
        self.graphs.append(Graph(works))
        return SUCCESS, self.graphs[-1]

    def cudaGraphInstantiate(self, graph: Graph, flags: int) -> tuple[Status, Graph | None]:
        """Make a graph that can be launched."""
        if status := self._enter("cudaGraphInstantiate", graph, flags):
            return status, None
        self._check_alive("cudaGraphInstantiate", graph)
        self.graphs.append(Graph(graph.works, launchable=True))
        return SUCCESS, self.graphs[-1]

    def cudaGraphLaunch(self, graphExec: Graph, stream: Any) -> tuple[Status]:
        """Enqueue all that was captured."""
        if status := self._enter("cudaGraphLaunch", graphExec, stream):
            return (status,)
        self._check_alive("cudaGraphLaunch", graphExec)
        if not graphExec.launchable or graphExec.stale:
            self.violate(f"cudaGraphLaunch: {graphExec.stale or 'it was not instantiated'}")
        for work in graphExec.works:
            if any(block.freed for block in work.blocks):
                self.violate(f"cudaGraphLaunch: {work.what} uses memory that was freed")
            self.enqueue(replace(work, stream=self._on(stream), owner=graphExec, done=False))
        return (SUCCESS,)

    def cudaGraphDestroy(self, graph: Graph) -> tuple[Status]:
        """Destroy a captured graph."""
        if status := self._enter("cudaGraphDestroy", graph):
            return (status,)
        self._destroy_graph("cudaGraphDestroy", graph, launchable=False)
        return (SUCCESS,)

    def cudaGraphExecDestroy(self, graphExec: Graph) -> tuple[Status]:
        """Destroy a launchable graph that is not running."""
        if status := self._enter("cudaGraphExecDestroy", graphExec):
            return (status,)
        self._destroy_graph("cudaGraphExecDestroy", graphExec, launchable=True)
        return (SUCCESS,)

    # The rules.

    def _new_stream(self) -> Stream:
        self._next_stream += 1
        self._streams[self._next_stream] = []
        self._homes[self._next_stream] = self.current_device
        return Stream(self._next_stream)

    def _do_next(self, queue: list[Work]) -> None:
        work = queue.pop(0)
        work.run()
        work.done = True

    def _do_up_to(self, last: Work | None) -> None:
        while last and not last.done:
            self._do_next(self._streams[last.stream])

    def _check_alive(self, what: str, item: Event | Graph) -> None:
        if item.destroyed:
            self.violate(f"{what}: the {type(item).__name__.lower()} was destroyed")

    def _destroy_graph(self, what: str, graph: Graph, *, launchable: bool) -> None:
        self._check_alive(what, graph)
        if graph.launchable != launchable:
            self.violate(f"{what} is for the other kind of graph")
        graph.destroyed = True  # also if it is a mistake, which is told once
        if self.pending(graph):
            self.violate(f"{what}: the graph is running")

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
            unread = [work for work in queue if work.to_host and waits_for != handle]
            if unread and not reason:
                queue[:] = [work for work in queue if not work.to_host]  # the host moved on
                self.violate(f"{function} before a copy to the host on stream {handle} was done")
        return reason

    def _check_size(self, what: str, size: int) -> None:
        if size <= 0:
            self.violate(f"{what}: {size} bytes; for none, CUDA returns no address")

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

    def _free(self, block: Block, allowed_stream: int | None = None) -> None:
        for stream, queue in self._streams.items():
            users = [work.what for work in queue if block in work.blocks]
            if users and stream != allowed_stream:
                self.violate(f"memory at {block.address:#x} is freed before {users} is done")
        block.freed = True
        if allowed_stream is None or not self._streams[allowed_stream]:
            block.memory.fill(GARBAGE)

    def _enqueue_upload(self, copy: Copy) -> None:
        what = "a copy to the device"
        blocks = self.blocks_at(copy.target, copy.nbytes, what)
        view, pinned = self.view(copy.target, copy.nbytes), self._pinned_at(copy.source)
        copy.source_is_pinned = pinned is not None
        at_once = ctypes.string_at(copy.source, copy.nbytes)

        def run() -> None:
            if pinned and ctypes.string_at(copy.source, copy.nbytes) != at_once:
                self.violate("pinned memory was overwritten before it was copied")
            view[:] = np.frombuffer(at_once, np.uint8)

        sources = [] if pinned is None else [pinned]
        self.enqueue(Work(what, copy.stream, [*blocks, *sources], run))

    def _enqueue_download(self, copy: Copy) -> None:
        what = "a copy to the host"
        blocks = self.blocks_at(copy.source, copy.nbytes, what)
        view = self.view(copy.source, copy.nbytes)
        ctypes.memset(copy.target, GARBAGE, copy.nbytes)

        def run() -> None:
            ctypes.memmove(copy.target, view.tobytes(), copy.nbytes)

        self.enqueue(Work(what, copy.stream, blocks, run, to_host=True))

    def _pinned_at(self, address: int) -> Block | None:
        for block in self._pinned:
            if block.address <= address < block.end and not block.freed:
                return block
        return None
