"""Memory of the fake CUDA driver: allocation, copies, and what an address belongs to."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.fakes.fake_cuda_state import (
    ALIGNMENT,
    DEVICE_BASE,
    GARBAGE,
    MAX_PITCH,
    SUCCESS,
    Block,
    Copy,
    CopyKind,
    FakeCudaState,
    Status,
    Work,
)

DEVICE_BYTES = 1 << 30


class FakeCudaMemory(FakeCudaState):
    """The functions on memory."""

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrMemoryPoolsSupported=115)
    has_pools = 1  # of memory that is allocated on streams

    def cudaDeviceGetAttribute(self, attr: int, device: int) -> tuple[Status, int]:
        """Say whether there are memory pools; nothing else is asked."""
        assert attr == self.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported
        return self._enter("cudaDeviceGetAttribute", attr, device), self.has_pools

    def cudaPointerGetAttributes(self, ptr: int) -> tuple[Status, SimpleNamespace | None]:
        """Return, of memory, the GPU that it is of."""
        if status := self._enter("cudaPointerGetAttributes", ptr):
            return status, None
        (block,) = self.blocks_at(ptr, 1, "cudaPointerGetAttributes")
        return SUCCESS, SimpleNamespace(device=block.device)

    def cudaDriverGetVersion(self) -> tuple[Status, int]:
        """Return the newest CUDA that the driver knows: 13.0."""
        return self._enter("cudaDriverGetVersion"), 13000

    def cudaGetDeviceProperties(self, device: int) -> tuple[Status, SimpleNamespace]:
        """Describe a GPU."""
        name = f"Fake GPU {device}".encode()
        status = self._enter("cudaGetDeviceProperties", device)
        return status, SimpleNamespace(name=name, major=9, minor=device)

    def cudaMemGetInfo(self) -> tuple[Status, int, int]:
        """Return the free and all bytes of the current GPU: DEVICE_BYTES less what is allocated."""
        if status := self._enter("cudaMemGetInfo"):
            return status, 0, 0
        taken = sum(b.end - b.address for b in self._device if b.device == self.current_device)
        return SUCCESS, DEVICE_BYTES - taken, DEVICE_BYTES

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
        elif kind is CopyKind.cudaMemcpyDeviceToDevice:
            self._enqueue_move(copy)
        else:
            self._enqueue_download(copy)
        return (SUCCESS,)

    def cudaMemsetAsync(self, pointer: int, value: int, count: int, stream: Any) -> tuple[Status]:
        """Fill device memory once the stream is waited for."""
        if status := self._enter("cudaMemsetAsync", pointer, value, count, stream):
            return (status,)
        self._enqueue_fill(pointer, value, count, self._on(stream))
        return (SUCCESS,)

    def cudaMemcpy2DAsync(
        self,
        dst: int,
        dpitch: int,
        src: int,
        spitch: int,
        width: int,
        height: int,
        kind: CopyKind,
        stream: Any,
    ) -> tuple[Status]:
        """Copy `height` pieces of `width` bytes from device to device, as one copy."""
        args = (dst, dpitch, src, spitch, width, height, kind, stream)
        if status := self._enter("cudaMemcpy2DAsync", *args):
            return (status,)
        self._check_pitch("cudaMemcpy2DAsync", width, dpitch, spitch)
        for row in range(height):
            target, source = dst + row * dpitch, src + row * spitch
            self._enqueue_move(Copy(target, source, width, kind, self._on(stream)))
        return (SUCCESS,)

    def cudaMemset2DAsync(
        self, devPtr: int, pitch: int, value: int, width: int, height: int, stream: Any
    ) -> tuple[Status]:
        """Fill `height` pieces of `width` bytes."""
        if status := self._enter("cudaMemset2DAsync", devPtr, pitch, value, width, height, stream):
            return (status,)
        self._check_pitch("cudaMemset2DAsync", width, pitch)
        for row in range(height):
            self._enqueue_fill(devPtr + row * pitch, value, width, self._on(stream))
        return (SUCCESS,)

    def _check_pitch(self, what: str, width: int, *pitches: int) -> None:
        if not all(width <= pitch <= MAX_PITCH for pitch in pitches):
            self.violate(f"{what}: {width} bytes do not fit pitches of {pitches}")

    def _enqueue_fill(self, pointer: int, value: int, count: int, stream: int) -> None:
        blocks, view = self.blocks_at(pointer, count, "a fill"), self.view(pointer, count)
        self.enqueue(Work("a fill", stream, blocks, lambda: view.fill(value)))

    def _enqueue_move(self, copy: Copy) -> None:
        what = "a copy on the device"
        target, source = (self.view(at, copy.nbytes) for at in (copy.target, copy.source))
        blocks = [
            *self.blocks_at(copy.target, copy.nbytes, what),
            *self.blocks_at(copy.source, copy.nbytes, what),
        ]
        if abs(copy.target - copy.source) < copy.nbytes:
            self.violate(f"{what}: source and target overlap")

        def run() -> None:
            target[:] = source

        self.enqueue(Work(what, copy.stream, blocks, run))

    def _check_size(self, what: str, size: int) -> None:
        if size <= 0:
            self.violate(f"{what}: {size} bytes; for none, CUDA returns no address")

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
        what, pinned = "a copy to the host", self._pinned_at(copy.target)
        blocks = [*self.blocks_at(copy.source, copy.nbytes, what), *([pinned] if pinned else [])]
        view = self.view(copy.source, copy.nbytes)
        ctypes.memset(copy.target, GARBAGE, copy.nbytes)

        def run() -> None:
            ctypes.memmove(copy.target, view.tobytes(), copy.nbytes)

        self.enqueue(Work(what, copy.stream, blocks, run, to_host=pinned is None))

    def _pinned_at(self, address: int) -> Block | None:
        for block in self._pinned:
            if block.address <= address < block.end and not block.freed:
                return block
        return None
