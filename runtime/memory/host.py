"""Memory protocol of executors, host memory, and the layout of packed tensors."""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.memory.tensor import HOST, Tensor, tensor_from_numpy

ALIGNMENT = 256  # bytes; what TensorRT asks of the address of every input and output

Stream = Any  # a CUDA stream handle: an int, or an object that int() takes; None is the default


@dataclass(frozen=True)
class Blocks:
    """Pieces of memory of one size, equally far apart."""

    nbytes: int  # of each
    count: int = 1
    stride: int = 0  # bytes from the start of one to the start of the next

    @property
    def offsets(self) -> range:
        """Where each begins, in bytes from the first."""
        return range(0, self.count * self.stride, self.stride) if self.count > 1 else range(1)


class Memory(Protocol):
    """Makes tensors on the device of an executor."""

    @property
    def device(self) -> str:
        """Name of the device, as in `Tensor.device`."""
        ...

    def upload(self, tensors: Mapping[str, Tensor], stream: Stream = None) -> dict[str, Tensor]:
        """Return the tensors on the device, those of the host moved there in one buffer."""
        ...

    def zeros(self, nbytes: int, *, sparse: bool = False) -> Tensor:
        """Return `nbytes` bytes of zeros as a bool tensor [nbytes].

        Args:
            nbytes: the size.
            sparse: much of it may never be written to, and shall take no memory where it can.
        """
        ...

    def free_bytes(self) -> int:
        """Return how much of the device's memory is free now."""
        ...

    def write(self, tensors: Mapping[int, Tensor]) -> None:
        """Copy host tensors to addresses of the device; every run that begins later reads them."""
        ...

    def copy(self, target: int, source: int, blocks: Blocks) -> None:
        """Copy blocks from address to address on the device; they do not overlap."""
        ...

    def clear(self, pointer: int, blocks: Blocks) -> None:
        """Write zeros to the blocks at an address of the device."""
        ...


class HostMemory:
    """The executor reads host memory: nothing needs to move."""

    device = HOST

    def upload(self, tensors: Mapping[str, Tensor], stream: Stream = None) -> dict[str, Tensor]:
        """Return the same tensors.

        Raises:
            TensorError: one is on another device.
        """
        for name, tensor in tensors.items():
            if tensor.device != HOST:
                raise TensorError(
                    f"{name} is on {tensor.device}, but this engine runs on the {HOST}; "
                    "pass host arrays, or open the engine with backend='tensorrt'"
                )
        return dict(tensors)

    def zeros(self, nbytes: int, *, sparse: bool = False) -> Tensor:
        """Return `nbytes` bytes of zeros as a bool tensor [nbytes]; sparse ones in small pages."""
        buffer = _pages(nbytes, "MADV_NOHUGEPAGE") if sparse else host_buffer(nbytes)
        return tensor_from_numpy(buffer.view(np.bool_))

    def free_bytes(self) -> int:
        """Return how much memory is free now."""
        return free_host_memory()

    def write(self, tensors: Mapping[int, Tensor]) -> None:
        """Copy host tensors to addresses."""
        for target, tensor in tensors.items():
            ctypes.memmove(target, tensor.pointer, tensor.nbytes)

    def copy(self, target: int, source: int, blocks: Blocks) -> None:
        """Copy blocks from address to address; they do not overlap."""
        for offset in blocks.offsets:
            ctypes.memmove(target + offset, source + offset, blocks.nbytes)

    def clear(self, pointer: int, blocks: Blocks) -> None:
        """Write zeros to the blocks at an address."""
        for offset in blocks.offsets:
            ctypes.memset(pointer + offset, 0, blocks.nbytes)


def host_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros [nbytes], most of which will be used: a fault for 2 MB instead of 512."""
    return _pages(nbytes, "MADV_HUGEPAGE")


def _pages(nbytes: int, advice: str) -> npt.NDArray[np.uint8]:
    """Whole pages of zeros [nbytes], which the system has back with the last user.

    What malloc frees below 32 MB stays with the process, and adapters are as small as that.
    """
    pages = mmap.mmap(-1, max(nbytes, 1), access=mmap.ACCESS_COPY)
    with contextlib.suppress(AttributeError, OSError):  # of Linux, where it is compiled in
        pages.madvise(getattr(mmap, advice))
    return np.frombuffer(pages, np.uint8, nbytes)


def packed_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return host tensors of these shapes and dtypes in one buffer, laid out by `pack`."""
    nbytes, layout = pack(tensors, HOST)
    buffer = host_buffer(nbytes)
    return in_buffer(layout, buffer.ctypes.data, buffer)


def pack(tensors: Mapping[str, Tensor], device: str) -> tuple[int, dict[str, Tensor]]:
    """Lay tensors out one after another at aligned offsets; return the size and the layout.

    The pointers of the layout are offsets into a buffer still to be made.
    """
    offset, layout = 0, {}
    for name, tensor in tensors.items():
        layout[name] = Tensor(offset, tensor.shape, tensor.dtype, device)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offset, layout


def in_buffer(layout: Mapping[str, Tensor], pointer: int, owner: object) -> dict[str, Tensor]:
    """Turn the offsets of `pack` into addresses in the buffer at `pointer`, which is `owner`'s."""
    return {
        name: Tensor(pointer + place.pointer, place.shape, place.dtype, place.device, owner)
        for name, place in layout.items()
    }


def free_host_memory() -> int:
    """Return the bytes that new allocations may take without swapping; Linux's `MemAvailable`."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux
