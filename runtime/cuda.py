"""CUDA memory through cuda-python: device buffers, copies, and whether there is a GPU at all."""

import contextlib
import ctypes
import importlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.runtime.memory import ALIGNMENT, Stream, pack
from trt_lora.runtime.tensors import HOST, Array, Tensor


def cuda_obstacle() -> str:
    """Why no CUDA device can be used here; empty if one can."""
    try:
        count = call("cudaGetDeviceCount")
    except BackendError as error:
        return str(error)
    return "" if count else "there is no NVIDIA GPU"


def call(function: str, *args: Any) -> Any:
    """Call a function of the CUDA runtime and return its one result, or None.

    Raises:
        BackendError: cuda-python is missing, or the call failed; with NVIDIA's own explanation.
    """
    runtime = _runtime()
    try:
        status, *results = getattr(runtime, function)(*args)
    except RuntimeError as error:  # so says cuda-python 12 that there is no driver
        raise BackendError(f"{function}: {error}") from error
    if int(status) != 0:
        _, text = runtime.cudaGetErrorString(status)
        raise BackendError(f"{function}: {text.decode()} ({status.name})")
    return results[0] if results else None


def release(function: str, *args: Any) -> None:
    """Call a function that gives something back; a device that is lost has raised its error."""
    with contextlib.suppress(BackendError):
        call(function, *args)


def enum(name: str) -> Any:
    """Return an enum of the CUDA runtime, such as `cudaMemcpyKind`."""
    return getattr(_runtime(), name)


def _runtime() -> Any:
    """The CUDA runtime's bindings, imported when first needed."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise BackendError(
            f"cuda-python cannot be imported ({error}); pip install 'trt-lora[rtx]' or "
            "'trt-lora[tensorrt]'"
        ) from error


class DeviceBuffer:
    """Device memory for any stream, freed when the last tensor in it is gone.

    Whoever enqueues work on the memory waits for the work before letting go of it.
    """

    def __init__(self, nbytes: int) -> None:
        self.pointer = int(call("cudaMallocAsync", max(nbytes, ALIGNMENT), 0))
        weakref.finalize(self, release, "cudaFreeAsync", self.pointer, 0)
        call("cudaStreamSynchronize", 0)  # until then the memory is there for stream 0 only


def place(layout: Mapping[str, Tensor], buffer: DeviceBuffer) -> dict[str, Tensor]:
    """Turn the offsets of `pack` into addresses in `buffer`, which the tensors then own."""
    return {
        name: replace(tensor, pointer=buffer.pointer + tensor.pointer, owner=buffer)
        for name, tensor in layout.items()
    }


class CudaMemory:
    """Memory of one GPU."""

    def __init__(self, index: int = 0) -> None:
        self.device = f"cuda:{index}"

    def upload(self, tensors: Mapping[str, Tensor], stream: Stream = None) -> dict[str, Tensor]:
        """Move the host tensors into one device buffer, by one copy from pinned memory.

        Raises:
            BackendError: the device is out of memory.
            TensorError: a tensor is on another GPU, or at an address that TensorRT does not take.
        """
        for name, tensor in tensors.items():
            self._check_place(name, tensor)
        host = {name: tensor for name, tensor in tensors.items() if tensor.device == HOST}
        if not host:
            return dict(tensors)
        nbytes, layout = pack(host, self.device)
        buffer = DeviceBuffer(nbytes)
        pinned = int(call("cudaMallocHost", max(nbytes, ALIGNMENT)))
        try:
            for name, tensor in host.items():
                ctypes.memmove(pinned + layout[name].pointer, tensor.pointer, tensor.nbytes)
            kind = enum("cudaMemcpyKind").cudaMemcpyHostToDevice
            call("cudaMemcpyAsync", buffer.pointer, pinned, nbytes, kind, int(stream or 0))
            call("cudaStreamSynchronize", int(stream or 0))
        finally:
            release("cudaFreeHost", pinned)
        return dict(tensors) | place(layout, buffer)

    def zeros(self, nbytes: int) -> Tensor:
        """Return `nbytes` bytes of zeros as a bool tensor [nbytes]."""
        buffer = DeviceBuffer(nbytes)
        call("cudaMemsetAsync", buffer.pointer, 0, nbytes, 0)
        call("cudaStreamSynchronize", 0)
        return Tensor(buffer.pointer, (nbytes,), "bool", self.device, buffer)

    def empty(self, shapes: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, Tensor]:
        """Return uninitialised tensors in one buffer, from (name, dtype, shape)."""
        nbytes, layout = pack(
            {name: Tensor(0, shape, dt) for name, dt, shape in shapes}, self.device
        )
        return place(layout, DeviceBuffer(nbytes))

    def _check_place(self, name: str, tensor: Tensor) -> None:
        if tensor.device == HOST:
            return
        if tensor.device != self.device:
            raise TensorError(f"{name} is on {tensor.device}, the engine on {self.device}")
        if tensor.pointer % ALIGNMENT:
            raise TensorError(
                f"{name} is at address {tensor.pointer:#x}, which is no multiple of {ALIGNMENT}; "
                "pass a copy in memory of its own"
            )


def read(pointer: int, storage: Array) -> None:
    """Copy device memory at `pointer` into a host array and wait for it."""
    kind = enum("cudaMemcpyKind").cudaMemcpyDeviceToHost
    call("cudaMemcpyAsync", storage.ctypes.data, pointer, storage.nbytes, kind, 0)
    call("cudaStreamSynchronize", 0)
