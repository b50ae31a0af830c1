"""CUDA runtime calls, events, and the current device."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from trt_lora.plugins.cuda_bindings import bindings, checked
from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.memory.dtypes import Array


def cuda_obstacle() -> str:
    """Reason why no CUDA device can be used here; empty if one can."""
    try:
        if not call("cudaGetDeviceCount"):
            return "there is no NVIDIA GPU"
        device = call("cudaGetDevice")
        pools = constant("cudaDeviceAttr").cudaDevAttrMemoryPoolsSupported
        if call("cudaDeviceGetAttribute", pools, device):
            return ""
    except BackendError as error:
        return str(error)
    return (
        f"GPU {device} allocates no memory on streams (cudaMallocAsync), as virtual GPUs with some "
        "profiles; use another profile or another GPU"
    )


def call(function: str, *args: Any) -> Any:
    """Call a function of the CUDA runtime and return its one result, or None.

    Raises:
        BackendError: cuda-python is missing, or the call failed; with NVIDIA's own explanation.
    """
    try:
        result = checked("runtime", function, *args)
    except BackendError:
        with contextlib.suppress(BackendError):  # it is kept: TensorRT would take it for its own
            checked("runtime", "cudaGetLastError")
        raise
    return None if result == () else result


def try_call(function: str, *args: Any) -> Any:
    """Call a function that may fail, for clean-up: a lost device has raised its error already.

    Returns:
        What `call` returns, or None where the function failed.
    """
    with contextlib.suppress(BackendError):
        return call(function, *args)
    return None


def constant(name: str) -> Any:
    """Return a constant of the CUDA runtime, such as the enum `cudaMemcpyKind`."""
    return getattr(bindings("runtime"), name)


class OwnStream:
    """A stream of the current GPU that waits for no default stream; destroyed with this object."""

    def __init__(self, priority: int = 0) -> None:
        flags = constant("cudaStreamNonBlocking")
        self.handle = int(call("cudaStreamCreateWithPriority", flags, priority))
        weakref.finalize(self, try_call, "cudaStreamDestroy", self.handle)


class Event:
    """A point in the work of a stream of the current GPU; destroyed with this object."""

    def __init__(self) -> None:
        self._handle = call("cudaEventCreateWithFlags", constant("cudaEventDisableTiming"))
        weakref.finalize(self, try_call, "cudaEventDestroy", self._handle)

    def record(self, stream: int) -> None:
        """Stand for all that `stream` has been given."""
        call("cudaEventRecord", self._handle, stream)

    def wait(self) -> None:
        """Wait until the point is passed; not at all before the first `record`."""
        call("cudaEventSynchronize", self._handle)

    def make_wait(self, stream: int) -> None:
        """Make the further work of `stream` wait for it; the host does not wait."""
        call("cudaStreamWaitEvent", stream, self._handle, 0)


@contextlib.contextmanager
def on_device(index: int, do: Callable[..., Any] = call) -> Iterator[None]:
    """Make a GPU the one that this thread uses, and afterwards again the one it used before.

    CUDA is asked each time which that is, for any library in the thread may change it; nothing is
    set where it is the same. What belongs to a GPU (memory, the default stream, events, streams,
    all of TensorRT) is made and used there. Events, streams, graphs and pinned memory may be
    destroyed anywhere.

    Args:
        index: of the GPU.
        do: `try_call` where a lost device is no error, as in finalizers.
    """
    before = do("cudaGetDevice")
    if before == index:
        yield
        return
    do("cudaSetDevice", index)
    try:
        yield
    finally:
        if before is not None:
            try_call("cudaSetDevice", before)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Let Python collect no garbage in the block: memory freed by it would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def synchronized(stream: int) -> Iterator[None]:
    """Synchronize `stream` after the block, also when it raises: its memory may then be freed."""
    try:
        yield
    except BaseException:
        try_call("cudaStreamSynchronize", stream)
        raise
    call("cudaStreamSynchronize", stream)


def read(device: int, pointer: int, storage: Array) -> None:
    """Copy memory of a GPU at `pointer` into a host array and wait for it."""
    kind = constant("cudaMemcpyKind").cudaMemcpyDeviceToHost
    with on_device(device), synchronized(0):
        call("cudaMemcpyAsync", storage.ctypes.data, pointer, storage.nbytes, kind, 0)
