"""Launch the kernels of LoRA through the CUDA driver."""

import ctypes
import functools
from typing import Any

from trt_lora.plugins.compile_kernels import compile_ptx
from trt_lora.plugins.contract import MAX_SITES
from trt_lora.plugins.cuda_library import bindings, checked
from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.group import GroupBuffers, GroupShape
from trt_lora.plugins.launch import Chip, Launch, plan_launches


class Site(ctypes.Structure):
    """`Site` of lora.cu."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("column", ctypes.c_int),
    )


class Group(ctypes.Structure):
    """`Group` of lora.cu: the one argument of every kernel."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("k", ctypes.c_int),
        ("sites", ctypes.c_int),
        ("total_rank", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("site", Site * MAX_SITES),
    )


def group_of(shape: GroupShape, buffers: GroupBuffers, splits: int) -> Group:
    """Return the kernels' argument.

    Raises:
        TensorError: the buffers are not one A, B, output and, where it adds, y for each site.
    """
    sites = len(shape.sites)
    expected = (sites, sites, sites if shape.adds else 0, sites)
    given = tuple(map(len, (buffers.a, buffers.b, buffers.y, buffers.out)))
    if given != expected:
        raise TensorError(
            f"the group takes {expected} addresses of A, B, y and out, and was given {given}"
        )
    group = Group(buffers.x, buffers.workspace, shape.m, shape.k, sites, shape.total_rank, splits)
    column = 0
    addresses = zip(buffers.a, buffers.b, buffers.y or (None,) * sites, buffers.out, strict=True)
    for index, (site, (a, b, y, out)) in enumerate(zip(shape.sites, addresses, strict=True)):
        group.site[index] = Site(a, b, y, out, site.n, site.rank, column)
        column += site.rank
    return group


class Kernels:
    """The kernels on whichever GPU is current when they are launched."""

    def launch(self, shape: GroupShape, buffers: GroupBuffers, stream: int) -> None:
        """Enqueue one call of the operator on `stream`, a CUDA stream handle.

        The buffers stay alive, and A and B unchanged, until the stream has passed the call. The
        workspace has `workspace_bytes` bytes; what is in it before and after means nothing. The
        first call that wants a kernel compiles and loads it, so not while a stream is captured.

        Raises:
            BackendError: there is no GPU, or CUDA refused; with NVIDIA's own explanation.
            ConfigError: the kernels do not take such a group; see `plan_launches`.
            TensorError: a dimension is out of range, or an address is missing.
        """
        planned = _plan(shape, int(_call("cuCtxGetDevice")))
        group = group_of(shape, buffers, planned[0][1].splits)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(group))
        for function, launch in planned:
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


@functools.lru_cache(maxsize=4096)  # a decode loop comes with the same few shapes
def _plan(shape: GroupShape, device: int) -> tuple[tuple[Any, Launch], ...]:
    chip = chip_of(device)
    arch = "compute_90" if chip.compute_capability >= (9, 0) else "compute_80"
    launches = plan_launches(shape, chip)
    return tuple((_function(arch, launch.kernel), launch) for launch in launches)


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
    """Return what of a GPU decides the launches, by its number in this process.

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
