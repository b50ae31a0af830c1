"""A CUDA driver without a GPU: it has the GPUs it is told of, and keeps what it is to launch.

As in CUDA, a kernel runs on the GPU of its stream; the default stream is that of the current GPU.
"""

# functions and constants have NVIDIA's names
import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from trt_lora.plugins import cuda_bindings as cuda_library
from trt_lora.plugins.kernels import candidates
from trt_lora.plugins.kernels import launcher as kernels
from trt_lora.plugins.kernels.candidates import KernelRows
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.launcher import KernelGroup

ATTRIBUTES = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")


class Status(int):
    """A `CUresult`."""

    name = "CUDA_ERROR_ILLEGAL_ADDRESS"


@dataclass(frozen=True)
class Launched:
    """One kernel launch."""

    device: int
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    group: bytes  # the argument; empty where there is none
    programmatic: bool = False  # whether it may begin before the kernel before it has ended


class FakeDriver:
    """The functions of `cuda.bindings.driver` that the kernels use."""

    CUfunction = CUkernel = staticmethod(lambda handle: handle)
    CUdevice_attribute = SimpleNamespace(
        **{f"CU_DEVICE_ATTRIBUTE_{name}": index for index, name in enumerate(ATTRIBUTES)}
    )

    def __init__(
        self,
        *chips: Chip,
        current: Callable[[], int] = lambda: 0,
        device_of: Callable[[int], int] = lambda stream: 0,
    ) -> None:
        """Have GPUs; `current` and `device_of` tell that of this thread and of a stream."""
        self.chips: Sequence[Chip] = chips
        self.current, self.device_of = current, device_of
        self.status = 0  # what every call returns
        self.calls: list[str] = []
        self.loaded: list[bytes] = []
        self.launched: list[Launched] = []
        self.ready: set[tuple[int, str]] = set()  # GPUs and kernels that were loaded there
        self._names: list[str] = []

    @contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Be what the kernels find, who remember nothing of another driver."""
        real = cuda_library.bindings

        def bindings(name: str) -> Any:
            return self if name == "driver" else real(name)

        for module in (cuda_library, kernels):
            monkeypatch.setattr(module, "bindings", bindings)
        _forget()
        yield
        _forget()

    def __getattr__(self, name: str) -> Any:
        """Return a function that notes its call."""
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*args: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            return (Status(self.status), *getattr(self, f"_{name}")(*args))

        return function

    def cuGetErrorString(self, status: object) -> tuple[int, bytes]:
        """Explain a status."""
        return 0, b"an illegal memory access was encountered"

    def _cuInit(self, flags: int) -> tuple[()]:
        assert flags == 0
        return ()

    def _cuCtxGetDevice(self) -> tuple[int]:
        return (self.current(),)

    def _cuStreamGetDevice(self, stream: int) -> tuple[int]:
        assert stream
        return (self.device_of(stream),)

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:
        chip = self.chips[device]
        return ((*chip.compute_capability, chip.multiprocessors)[attribute],)

    def _cuLibraryLoadData(self, code: bytes, *_: object) -> tuple[int]:
        self.loaded.append(code)
        return (len(self.loaded),)

    def _cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int]:
        assert re.search(rb"\b%s\b" % name, self.loaded[library - 1])
        self._names.append(name.decode())
        return (len(self._names),)

    def _cuKernelGetFunction(self, kernel: int) -> tuple[int]:
        return (kernel,)

    def _cuFuncLoad(self, function: int) -> tuple[()]:
        self.ready.add((self.current(), self._names[function - 1]))
        return ()

    def _cuLaunchKernel(self, kernel: int, *args: Any) -> tuple[()]:
        *sizes, shared_bytes, stream, arguments, extra = args
        assert extra == 0
        device = self.device_of(stream) if stream else self.current()
        name, grid, block = self._names[kernel - 1], tuple(sizes[:3]), tuple(sizes[3:])
        group = _argument(name, arguments)
        self.launched.append(Launched(device, name, grid, block, shared_bytes, stream, group))
        return ()

    def _cuLaunchKernelEx(self, config: Any, kernel: int, arguments: int, extra: int) -> tuple[()]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        rest = (config.sharedMemBytes, int(config.hStream), arguments, extra)
        self._cuLaunchKernel(kernel, *grid, *block, *rest)
        (attribute,) = config.attrs
        early = attribute.value.programmaticStreamSerializationAllowed == config.numAttrs == 1
        self.launched[-1] = replace(self.launched[-1], programmatic=early)
        return ()


def _argument(kernel: str, arguments: int) -> bytes:
    if not arguments:
        return b""
    address = ctypes.c_void_p.from_address(arguments).value
    assert address is not None
    argument = KernelRows if kernel in candidates.CANDIDATE_KERNELS else KernelGroup
    return ctypes.string_at(address, ctypes.sizeof(argument))


def _forget() -> None:
    for cached in ("_plan", "_functions", "chip_of", "_start_driver"):
        getattr(kernels, cached).cache_clear()
    candidates._functions.cache_clear()
