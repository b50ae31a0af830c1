"""Device memory for checking kernels: poisoned, with guard bytes around every buffer."""

import ctypes
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trt_lora.runtime.cuda import call, constant, release
from trt_lora.runtime.dtypes import Array

GUARD_BYTES = 256  # before and behind every buffer
POISON = 0xFF  # as a float of any width a NaN


class RawMemory(Protocol):
    """Bytes that kernels read and write."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, a multiple of 256."""
        ...

    def free(self, address: int) -> None:
        """Give memory back."""
        ...

    def write(self, address: int, content: Array) -> None:
        """Copy a host array to the device, and wait."""
        ...

    def read(self, address: int, nbytes: int) -> Array:
        """Return bytes of the device, after all kernels have ended."""
        ...


class CudaRawMemory:
    """Memory of the current GPU through the CUDA runtime."""

    def allocate(self, nbytes: int) -> int:
        """See `RawMemory`."""
        return int(call("cudaMalloc", nbytes))

    def free(self, address: int) -> None:
        """See `RawMemory`."""
        release("cudaFree", address)

    def write(self, address: int, content: Array) -> None:
        """See `RawMemory`."""
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        call("cudaMemcpy", address, content.ctypes.data, content.nbytes, kind)

    def read(self, address: int, nbytes: int) -> Array:
        """See `RawMemory`."""
        call("cudaDeviceSynchronize")
        content = np.empty(nbytes, np.uint8)
        kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToHost
        call("cudaMemcpy", content.ctypes.data, address, nbytes, kind)
        return content


class HostRawMemory:
    """Host memory, for kernels that are emulated."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._arrays: dict[int, Array] = {}

    def allocate(self, nbytes: int) -> int:
        """See `RawMemory`."""
        array = np.empty(nbytes + 256, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self._arrays[address] = array
        return address

    def free(self, address: int) -> None:
        """See `RawMemory`."""
        del self._arrays[address]

    def write(self, address: int, content: Array) -> None:
        """See `RawMemory`."""
        ctypes.memmove(address, content.ctypes.data, content.nbytes)

    def read(self, address: int, nbytes: int) -> Array:
        """See `RawMemory`."""
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


@dataclass
class Guarded:
    """One buffer: guards, perhaps a shift, the content or poison, guards."""

    memory: RawMemory
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
        """Poison what is not an input."""
        self.memory.write(self._base, self._expected())

    def read(self) -> Array:
        """Return the buffer's bytes."""
        return self._split(self.memory.read(self._base, self._total))[0]

    def is_intact(self) -> bool:
        """Whether the guards, and an input's bytes, are as they were."""
        content, around = self._split(self.memory.read(self._base, self._total))
        if self.content is not None and content.tobytes() != self.content.tobytes():
            return False
        return bool((around == POISON).all())

    def free(self) -> None:
        """Give the memory back."""
        self.memory.free(self._base)

    @property
    def _total(self) -> int:
        return self.nbytes + 2 * GUARD_BYTES + self.shift

    def _expected(self) -> Array:
        filled = np.full(self._total, POISON, np.uint8)
        if self.content is not None:
            start = GUARD_BYTES + self.shift
            filled[start : start + self.nbytes] = np.frombuffer(self.content.tobytes(), np.uint8)
        return filled

    def _split(self, everything: Array) -> tuple[Array, Array]:
        start = GUARD_BYTES + self.shift
        end = start + self.nbytes
        return everything[start:end], np.concatenate((everything[:start], everything[end:]))
