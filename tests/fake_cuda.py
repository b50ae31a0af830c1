"""A CUDA runtime without a GPU: a strict stand-in for the module `cuda.bindings.runtime`.

* Device addresses are no host addresses: code that reads device memory in place crashes.
* Work happens when its stream is waited for, and not before. Streams promise each other no order,
  as with the streams of torch and with per-thread default streams.
* Memory is garbage before it is written and after it is freed, and no address is used twice.
* What breaks a rule raises `Violation` and is kept in `violations`, also when a finalizer did it.
"""

# functions and constants have NVIDIA's names
import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


class Violation(AssertionError):  # a broken rule, not an error of a user
    """A rule of CUDA was broken."""


class Status(IntEnum):
    """The part of `cudaError_t` that is needed."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700


class CopyKind(IntEnum):
    """The part of `cudaMemcpyKind` that is needed."""

    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


SUCCESS = Status.cudaSuccess
TEXTS = {
    Status.cudaErrorInvalidValue: b"invalid argument",
    Status.cudaErrorMemoryAllocation: b"out of memory",
    Status.cudaErrorInsufficientDriver: (
        b"CUDA driver version is insufficient for CUDA runtime version"
    ),
    Status.cudaErrorNoDevice: b"no CUDA-capable device is detected",
    Status.cudaErrorIllegalAddress: b"an illegal memory access was encountered",
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
    _made = 0  # so that no two GPUs have an address in common

    def __init__(self, devices: int = 1) -> None:
        super().__init__("cuda.bindings.runtime")
        self.devices = devices
        self.current_device = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.copies: list[Copy] = []
        self.violations: list[str] = []
        self._failures: dict[str, Status | RuntimeError] = {}
        self._fatal = ""  # the function whose next call finds the device lost
        self._lost: Status | None = None
        self._device: list[Block] = []
        self._pinned: list[Block] = []
        FakeCuda._made += 1
        self._base = self._next_address = DEVICE_BASE + (FakeCuda._made << 32)
        self._streams: dict[int, list[Work]] = {0: []}
        self._next_stream = 0x5000

    # What tests ask and arrange.

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what `import cuda.bindings.runtime` finds."""
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", self)

    def fail(self, function: str, reason: Status | RuntimeError) -> None:
        """Let the next call of `function` fail: with a status, or as cuda-python 12 does."""
        self._failures[function] = reason

    def lose_device_at(self, function: str) -> None:
        """Let the next call of `function` and all after it fail, as when a kernel crashed."""
        self._fatal = function

    def names(self) -> list[str]:
        """Names of the functions called, in order."""
        return [name for name, _ in self.calls]

    def live_blocks(self) -> list[Block]:
        """Memory that is not freed, of the device and of the host."""
        return [block for block in (*self._device, *self._pinned) if not block.freed]

    def live_streams(self) -> list[int]:
        """Streams that were created and not destroyed."""
        return [handle for handle in self._streams if handle]

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
        queue = self._queue(work.what, work.stream)
        for block in work.blocks:
            if block.home not in (None, work.stream):
                self.violate(
                    f"{work.what} on stream {work.stream}: nobody waited for stream {block.home}, "
                    "on which its memory was allocated"
                )
        queue.append(work)

    # NVIDIA's functions.

    def cudaGetDeviceCount(self) -> tuple[Status, int | None]:
        """How many GPUs there are."""
        status = self._enter("cudaGetDeviceCount")
        return status, None if status else self.devices

    def cudaGetDevice(self) -> tuple[Status, int | None]:
        """Return the GPU that this thread uses."""
        status = self._enter("cudaGetDevice")
        return status, None if status else self.current_device

    def cudaGetErrorString(self, error: Status) -> tuple[Status, bytes]:
        """Explain a status; asking is no work for the GPU and is not recorded."""
        return SUCCESS, TEXTS[error]

    def cudaMallocAsync(self, size: int, stream: Any) -> tuple[Status, int | None]:
        """Allocate device memory, which only `stream` may use at first."""
        if status := self._enter("cudaMallocAsync", size, stream):
            return status, None
        self._check_size("cudaMallocAsync", size)
        self._queue("cudaMallocAsync", int(stream))
        block = Block(self._next_address, np.full(size, GARBAGE, np.uint8), home=int(stream))
        self._next_address = (block.end // ALIGNMENT + 16) * ALIGNMENT
        self._device.append(block)
        return SUCCESS, block.address

    def cudaFreeAsync(self, pointer: int, stream: Any) -> tuple[Status]:
        """Free device memory, which no other stream may be using."""
        if status := self._enter("cudaFreeAsync", pointer, stream):
            return (status,)
        if DEVICE_BASE < pointer < self._base:
            return (SUCCESS,)  # what an earlier test left when it failed
        self._queue("cudaFreeAsync", int(stream))
        block = self._whole(self._device, pointer, "cudaFreeAsync")
        if block.home not in (None, int(stream)):
            self.violate(f"cudaFreeAsync: {pointer:#x} is still being allocated on another stream")
        self._free(block, allowed_stream=int(stream))
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
        copy = Copy(target, source, count, kind, int(stream))
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
        self.enqueue(Work("cudaMemsetAsync", int(stream), blocks, lambda: view.fill(value)))
        return (SUCCESS,)

    def cudaStreamCreate(self) -> tuple[Status, Stream | None]:
        """Make a stream."""
        if status := self._enter("cudaStreamCreate"):
            return status, None
        self._next_stream += 1
        self._streams[self._next_stream] = []
        return SUCCESS, Stream(self._next_stream)

    def cudaStreamDestroy(self, stream: Any) -> tuple[Status]:
        """Destroy a stream on which nothing is left to do."""
        if status := self._enter("cudaStreamDestroy", stream):
            return (status,)
        if self._queue("cudaStreamDestroy", int(stream)) or int(stream) == 0:
            self.violate(f"cudaStreamDestroy: stream {int(stream)} is in use")
        del self._streams[int(stream)]
        return (SUCCESS,)

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Status]:
        """Do the work of a stream."""
        if status := self._enter("cudaStreamSynchronize", stream):
            return (status,)
        queue = self._queue("cudaStreamSynchronize", int(stream))
        while queue:
            queue.pop(0).run()
        for block in self._device:
            if block.home == int(stream):
                block.home = None
        return (SUCCESS,)

    # The rules.

    def _enter(self, function: str, *args: Any) -> Status:
        self.calls.append((function, args))
        if function == self._fatal:
            self._lost = Status.cudaErrorIllegalAddress
        reason = self._failures.pop(function, self._lost or SUCCESS)
        if isinstance(reason, RuntimeError):
            raise reason
        waits_for = int(args[0]) if function == "cudaStreamSynchronize" else None
        for handle, queue in self._streams.items():
            unread = [work for work in queue if work.to_host and waits_for != handle]
            if unread and not reason:
                queue[:] = [work for work in queue if not work.to_host]  # the host moved on
                self.violate(f"{function} before a copy to the host on stream {handle} was done")
        return reason

    def _check_size(self, what: str, size: int) -> None:
        if size <= 0:
            self.violate(f"{what}: {size} bytes; for none, CUDA returns no address")

    def _queue(self, what: str, stream: int) -> list[Work]:
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
        at_once = ctypes.string_at(copy.source, 0 if pinned else copy.nbytes)

        def run() -> None:
            data = ctypes.string_at(copy.source, copy.nbytes) if pinned else at_once
            view[:] = np.frombuffer(data, np.uint8)

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
