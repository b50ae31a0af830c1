"""Memory for checking kernels, a GPU's or the host's: poisoned, and guarded around every buffer."""

import ctypes
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trt_lora.runtime.memory.cuda import call, constant, try_call
from trt_lora.runtime.memory.dtypes import Array

GUARD_BYTES = 256  # before and behind every buffer
POISON = 0xFF  # as a float of any width a NaN


class Memory(Protocol):
    """Bytes that kernels read and write."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, a multiple of 256."""
        ...

    def free(self, address: int) -> None:
        """Give memory back."""
        ...

    def write(self, address: int, content: Array) -> None:
        """Copy a host array there, and wait."""
        ...

    def read(self, address: int, nbytes: int) -> Array:
        """Return bytes from there, after all kernels have ended."""
        ...


class CudaMemory:
    """Memory of the current GPU."""

    def allocate(self, nbytes: int) -> int:
        """See `Memory`."""
        return int(call("cudaMalloc", nbytes))

    def free(self, address: int) -> None:
        """See `Memory`."""
        try_call("cudaFree", address)

    def write(self, address: int, content: Array) -> None:
        """See `Memory`."""
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        call("cudaMemcpy", address, content.ctypes.data, content.nbytes, kind)

    def read(self, address: int, nbytes: int) -> Array:
        """See `Memory`."""
        call("cudaDeviceSynchronize")
        content = np.empty(nbytes, np.uint8)
        kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToHost
        call("cudaMemcpy", content.ctypes.data, address, nbytes, kind)
        return content


class HostMemory:
    """Memory of this process, for kernels that are emulated."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._arrays: dict[int, Array] = {}

    def allocate(self, nbytes: int) -> int:
        """See `Memory`."""
        array = np.empty(nbytes + 256, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self._arrays[address] = array
        return address

    def free(self, address: int) -> None:
        """See `Memory`."""
        del self._arrays[address]

    def write(self, address: int, content: Array) -> None:
        """See `Memory`."""
        ctypes.memmove(address, content.ctypes.data, content.nbytes)

    def read(self, address: int, nbytes: int) -> Array:
        """See `Memory`."""
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


@dataclass
class Guarded:
    """One buffer: guards, perhaps a shift, the content or poison, guards."""

    memory: Memory
    nbytes: int
    content: Array | None = None  # of an input; an output is poisoned
    shift: int = 0  # bytes by which the buffer misses its alignment
    _base: int = field(init=False)

    def __post_init__(self) -> None:
        """Take the memory and fill it."""
        self._base = self.memory.allocate(self._total)
        self.reset()

    @property
    def address(self) -> int:
        """Where the buffer begins."""
        return self._base + GUARD_BYTES + self.shift

    def reset(self) -> None:
        """Fill in the content, or poison."""
        filled = np.full(self._total, POISON, np.uint8)
        if self.content is not None:
            self._split(filled)[0][:] = np.frombuffer(self.content.tobytes(), np.uint8)
        self.memory.write(self._base, filled)

    def read(self) -> Array:
        """Return the buffer's bytes."""
        return self._split(self.memory.read(self._base, self._total))[0]

    def is_intact(self) -> bool:
        """Whether the guards, and an input's bytes, are as they were."""
        content, before, behind = self._split(self.memory.read(self._base, self._total))
        if self.content is not None and content.tobytes() != self.content.tobytes():
            return False
        return bool((before == POISON).all() and (behind == POISON).all())

    def free(self) -> None:
        """Give the memory back."""
        self.memory.free(self._base)

    @property
    def _total(self) -> int:
        return self.nbytes + 2 * GUARD_BYTES + self.shift

    def _split(self, everything: Array) -> tuple[Array, Array, Array]:
        """The buffer, and what is before and behind it."""
        start = GUARD_BYTES + self.shift
        end = start + self.nbytes
        return everything[start:end], everything[:start], everything[end:]
