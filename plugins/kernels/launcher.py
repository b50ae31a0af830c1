"""Launch the LoRA kernels through the CUDA driver API."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trt_lora.plugins.contract.sites import MAX_SITES
from trt_lora.plugins.cuda_bindings import bindings, checked
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.plugins.kernels.launch_plan import Chip, Launch, plan_launches
from trt_lora.plugins.kernels.nvrtc import compile_ptx


class KernelSite(ctypes.Structure):
    """`Site` of cuda_cores.cu."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("column", ctypes.c_int),
        ("rank_tile", ctypes.c_int),
    )


class KernelGroup(ctypes.Structure):
    """`Group` of cuda_cores.cu: the one argument of every kernel."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("k", ctypes.c_int),
        ("sites", ctypes.c_int),
        ("total_rank", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("rank_tiles", ctypes.c_int),
        ("site", KernelSite * MAX_SITES),
    )


def group_of(shape: GroupShape, buffers: GroupBuffers, splits: int) -> KernelGroup:
    """Return the kernels' argument.

    Raises:
        TensorError: the buffers are not one A, B, output and, with an addend, y for each site.
    """
    sites = len(shape.sites)
    expected = (sites, sites, sites if shape.has_addend else 0, sites)
    given = tuple(map(len, (buffers.a, buffers.b, buffers.y, buffers.out)))
    if given != expected:
        raise TensorError(
            f"the group takes {expected} addresses of A, B, y and out, and was given {given}"
        )
    column, tile, rows = 0, 0, []
    addresses = zip(buffers.a, buffers.b, buffers.y or (None,) * sites, buffers.out, strict=True)
    for site, pointers in zip(shape.sites, addresses, strict=True):
        rows.append((*pointers, site.n, site.rank, column, tile))
        column += site.rank
        tile += site.rank_tiles
    x, workspace = buffers.x, buffers.workspace
    return KernelGroup(x, workspace, shape.m, shape.k, sites, column, splits, tile, tuple(rows))


@dataclass(frozen=True)
class PlannedCall:
    """One call of the operator as one GPU runs it, to be launched with any addresses."""

    shape: GroupShape
    launches: tuple[tuple[Any, Launch], ...]  # each with its kernel, in order
    unaligned: Callable[[], "PlannedCall"] | None = None  # for other addresses, if not the same

    def launch(self, buffers: GroupBuffers, stream: int) -> None:
        """Enqueue the call on `stream`, a CUDA stream handle of that GPU.

        The first call with addresses that are not aligned may compile and load other kernels.
        The buffers stay alive, and A and B unchanged, until the stream has passed the call. The
        workspace has `workspace_bytes` bytes; what is in it before and after means nothing.

        Raises:
            BackendError: CUDA refused; with NVIDIA's own explanation.
            TensorError: an address is missing.
        """
        if self.unaligned and not buffers.aligned:
            self.unaligned().launch(buffers, stream)
            return
        group = group_of(self.shape, buffers, self.launches[0][1].splits)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(group))
        for function, launch in self.launches:
            _call(
                "cuLaunchKernel",
                function,
                *launch.grid,
                *(launch.block, 1, 1),
                launch.shared_bytes,
                stream,
                ctypes.addressof(arguments),
                0,
            )


class Kernels:
    """The kernels on the GPU of the stream that they are launched on, whichever is current."""

    def planned(self, shape: GroupShape, stream: int) -> PlannedCall:
        """Return the call as the GPU of `stream` runs it; the driver is asked which that is.

        The first call that wants a kernel compiles and loads it, so not while a stream is captured.

        Raises:
            BackendError: there is no GPU, or CUDA refused; with NVIDIA's own explanation.
            ConfigError: the kernels do not take such a group; see `plan_launches`.
            TensorError: a dimension is out of range.
        """
        return _plan(shape, _device_of(stream), aligned=True)

    def launch(self, shape: GroupShape, buffers: GroupBuffers, stream: int) -> None:
        """Plan and enqueue one call on `stream`; see `planned` and `PlannedCall.launch`."""
        self.planned(shape, stream).launch(buffers, stream)


def _device_of(stream: int) -> int:
    """The GPU on which work of the stream runs; that of the default stream is the current one."""
    return int(_call("cuStreamGetDevice", stream) if stream else _call("cuCtxGetDevice"))


@functools.lru_cache(maxsize=4096)  # all nodes of a kind have the same few shapes
def _plan(shape: GroupShape, device: int, *, aligned: bool) -> PlannedCall:
    chip = chip_of(device)
    arch = "compute_90" if chip.compute_capability >= (9, 0) else "compute_80"
    launches = plan_launches(shape, chip, aligned=aligned)
    planned = tuple((_function(arch, each.kernel), each) for each in launches)
    if plan_launches(shape, chip, aligned=False) == launches:
        return PlannedCall(shape, planned)
    return PlannedCall(shape, planned, functools.partial(_plan, shape, device, aligned=False))


@functools.cache
def _function(arch: str, kernel: str) -> Any:
    """One kernel, which the driver loads on every GPU where it is launched.

    Each is compiled when it is first wanted: half a second, where all take ten.
    """
    library = _call("cuLibraryLoadData", compile_ptx(arch, (kernel,)), [], [], 0, [], [], 0)
    found = _call("cuLibraryGetKernel", library, kernel.encode())
    return bindings("driver").CUfunction(int(found))  # cuLaunchKernel takes either


@functools.cache
def chip_of(device: int) -> Chip:
    """Return the launch parameters of a GPU, by its number in this process.

    Raises:
        BackendError: there is no such GPU; with NVIDIA's own explanation.
    """
    prefix = "CU_DEVICE_ATTRIBUTE"
    names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
    attributes = bindings("driver").CUdevice_attribute
    major, minor, multiprocessors = (
        int(_call("cuDeviceGetAttribute", getattr(attributes, f"{prefix}_{name}"), device))
        for name in names
    )
    return Chip((major, minor), multiprocessors)


def _call(function: str, *args: Any) -> Any:
    """Call a function of the CUDA driver and return its results."""
    _start_driver()
    return checked("driver", function, *args)


@functools.cache
def _start_driver() -> None:
    checked("driver", "cuInit", 0)
