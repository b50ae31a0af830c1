"""Kernels beside ours: one that does nothing, and one that begins before the kernel before ends."""

import ctypes
import functools
from typing import Any

from trt_lora.plugins.cuda_bindings import bindings, checked
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.plugins.kernels.launch_plan import Chip, Launch
from trt_lora.plugins.kernels.launcher import enqueue, group_of, load_kernels
from trt_lora.plugins.kernels.nvrtc import (
    ELEMENTS,
    architecture_of,
    cached_code,
    entry_point,
    source,
)
from trt_lora.plugins.kernels.passes import launches_of

_EMPTY = """extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS) empty() {}
extern "C" __global__ void __launch_bounds__(THREADS) empty_alone() {}
"""
# Nothing may be read before the wait that another kernel of the graph writes: A and B are inputs.
_EARLY = """
template <class T> DEVICE void prefetch_matrix(const void* first, int rows, int columns) {
  const long long bytes = offset(rows, columns) * int(sizeof(T));
  const long long step = 128ll * THREADS * gridDim.x;
  for (long long at = 128ll * (blockIdx.x * THREADS + threadIdx.x); at < bytes; at += step)
    prefetch(static_cast<const char*>(first) + at);
}
template <class T> DEVICE void prefetch_and_wait(const Group& group) {
  for (int s = 0; s < group.sites; ++s) {
    prefetch_matrix<T>(group.site[s].a, group.k, group.site[s].rank);
    prefetch_matrix<T>(group.site[s].b, group.site[s].rank, group.site[s].n);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
"""


def launch_empty(shape: GroupShape, buffers: GroupBuffers, stream: int, chip: Chip) -> None:
    """Enqueue as many CTAs as a call has, in the same clusters, that return at once.

    Raises:
        BackendError: CUDA refused; with NVIDIA's own explanation.
    """
    for launch in launches_of(shape, chip, aligned=buffers.aligned):
        enqueue_empty(launch, stream, chip)


def enqueue_empty(launch: Launch, stream: int, chip: Chip) -> None:
    """Enqueue one launch of a kernel that does nothing.

    Raises:
        BackendError: CUDA refused; with NVIDIA's own explanation.
    """
    name = "empty" if launch.cluster > 1 else "empty_alone"
    enqueue(_loaded(architecture_of(chip), source() + _EMPTY, name), launch, 0, stream)


def can_be_early(shape: GroupShape, chip: Chip) -> bool:
    """Whether a call is one kernel that can begin before the one before it has ended.

    None with slots: which A and B a row takes is known behind the wait.
    """
    is_decode = launches_of(shape, chip)[0].kernel.startswith("decode")
    return is_decode and chip.compute_capability >= (9, 0)


def early_text(kernel: str, dtype: str) -> str:
    """Return the CUDA C++ of a kernel that asks for A and B, and then waits for what ran before."""
    begin = f"{{ prefetch_and_wait<{ELEMENTS[dtype]}>(group); "
    return source() + _EARLY + entry_point(kernel).replace("{ ", begin, 1)


def launch_early(shape: GroupShape, buffers: GroupBuffers, stream: int, chip: Chip) -> None:
    """Enqueue a call for which `can_be_early`: with programmatic serialization of the stream.

    Raises:
        BackendError: CUDA refused; with NVIDIA's own explanation.
    """
    (launch,) = launches_of(shape, chip)
    text = early_text(launch.kernel, shape.dtype)
    function = _loaded(architecture_of(chip), text, launch.kernel)
    group = group_of(shape, buffers, launch.splits)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(group))
    config = _programmatic(launch, stream)
    checked("driver", "cuLaunchKernelEx", config, function, ctypes.addressof(arguments), 0)


def _programmatic(launch: Launch, stream: int) -> Any:
    driver = bindings("driver")
    attribute = driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes, config.hStream = launch.shared_bytes, driver.CUstream(stream)
    config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.cache
def _loaded(arch: str, text: str, name: str) -> Any:
    return load_kernels(cached_code(arch, text), (name,))[name]
