"""What lies between the products of a layer: RMS norm and SiLU(gate) * up, one kernel each.

TensorRT fuses them so, and also adds LoRA's deltas to gate and up on the way; torch takes two to
six kernels. With torch's, a base step would be slower than an engine's, and LoRA's share too small.
"""

import ctypes
import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from trt_lora.plugins.compile_kernels import compile_source, source
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels import Group

# The struct `Group` of lora.cu is the argument, so that the tests can emulate these kernels too.
# rms_norm: x [m, k], weight site 0's a [k], out site 0's out [m, k]. Grid: [m].
# gated: for gate and up, a [m, stride rank] and perhaps the delta b [m, n]. Grid: [n / 2048, m].
TEXT = """
template <class T> DEVICE void rms_norm(const Group& group) {
  const T* x = static_cast<const T*>(group.x) + offset(blockIdx.x, group.k);
  const T* weight = static_cast<const T*>(group.site[0].a);
  T* out = static_cast<T*>(group.site[0].out) + offset(blockIdx.x, group.k);
  float* sums = reinterpret_cast<float*>(shared_memory());
  float sum = 0.0f;
  for (int i = threadIdx.x * 8; i < group.k; i += THREADS * 8) {
    const Pack pack = read16(x + i);
    for (int j = 0; j < 8; ++j) sum += element(pack, j, T{}) * element(pack, j, T{});
  }
  for (int mask = 16; mask >= 1; mask /= 2) sum += shuffle_xor(sum, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < THREADS / 32; ++warp) total += sums[warp];
  const float scale = 1.0f / sqrtf(total / group.k + 1e-5f);
  for (int i = threadIdx.x * 8; i < group.k; i += THREADS * 8) {
    const Pack pack = read16(x + i), by = read16(weight + i);
    Pack to = {};
    for (int j = 0; j < 8; ++j) {
      T rounded;
      round_to(rounded, element(pack, j, T{}) * scale * element(by, j, T{}));
      put(to, j, rounded);
    }
    write16(out + i, to);
  }
}

template <class T> DEVICE float sum_at(const Site& site, const Pack& y, const Pack& delta, int j) {
  return element(y, j, T{}) + (site.b ? element(delta, j, T{}) : 0.0f);
}

template <class T> DEVICE void gated(const Group& group) {
  const Site& gate = group.site[0];
  const Site& up = group.site[1];
  const int row = blockIdx.y, i = (blockIdx.x * THREADS + threadIdx.x) * 8;
  if (i >= gate.n) return;
  const long long at = offset(row, gate.rank) + i, dense = offset(row, gate.n) + i;
  const Pack y_gate = read16(static_cast<const T*>(gate.a) + at);
  const Pack y_up = read16(static_cast<const T*>(up.a) + at);
  const Pack d_gate = gate.b ? read16(static_cast<const T*>(gate.b) + dense) : Pack{};
  const Pack d_up = up.b ? read16(static_cast<const T*>(up.b) + dense) : Pack{};
  Pack to = {};
  for (int j = 0; j < 8; ++j) {
    const float value = sum_at<T>(gate, y_gate, d_gate, j);
    T rounded;
    round_to(rounded, value / (1.0f + expf(-value)) * sum_at<T>(up, y_up, d_up, j));
    put(to, j, rounded);
  }
  write16(static_cast<T*>(gate.out) + dense, to);
}
"""
ELEMENTS = {torch.float16: "Float16", torch.bfloat16: "BFloat16"}
THREADS = 256
STRIP = 8  # elements of 16 bytes


def entry_points(element: str) -> str:
    """Return the C++ that makes the templates above kernels for one type of element."""
    bodies = {
        "rms_norm": f"rms_norm<{element}>(group);",
        "gated": f"gated<{element}>(group);",
        "nothing": "",
        "IN_CLUSTERS nothing_in_clusters": "",
    }
    return "".join(
        f'extern "C" __global__ void {name}(const __grid_constant__ Group group) {{ {body} }}\n'
        for name, body in bodies.items()
    )


class Glue(Protocol):
    """The kernels, on tensors."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write `x / rms(x) * weight` [m, k] to `out`, and return it."""
        ...

    def gated(
        self, y: Sequence[torch.Tensor], deltas: Sequence[torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        """Write `silu(gate) * up` [m, n] to `out`, and return it; deltas are added before."""
        ...

    def nothing(self, *, clusters: bool = False) -> None:
        """Launch a kernel that does nothing: what a node of a graph costs."""
        ...


class CudaGlue:
    """The kernels on a GPU, on torch's current stream."""

    def __init__(self, dtype: torch.dtype, capability: tuple[int, int]) -> None:
        """Compile for a type of element; takes half a second.

        Raises:
            BackendError: NVRTC is missing, or refused the text.
        """
        arch = "compute_90" if capability >= (9, 0) else "compute_80"
        text = source() + TEXT + entry_points(ELEMENTS[dtype])
        ptx = compile_source(text, (f"--gpu-architecture={arch}", "--std=c++17"))
        self._library = _driver("cuLibraryLoadData", ptx, [], [], 0, [], [], 0)
        self._function = functools.cache(self._find)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See `Glue`."""
        self._launch("rms_norm", norm_group(x, weight, out), (x.shape[0], 1))
        return out

    def gated(
        self, y: Sequence[torch.Tensor], deltas: Sequence[torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        """See `Glue`."""
        m, n = out.shape
        self._launch("gated", gated_group(y, deltas, out), (-(-n // (STRIP * THREADS)), m))
        return out

    def nothing(self, *, clusters: bool = False) -> None:
        """See `Glue`."""
        name = "nothing_in_clusters" if clusters else "nothing"
        self._launch(name, Group(), (8, 1))  # one cluster

    def _launch(self, name: str, group: Group, grid: tuple[int, int]) -> None:
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(group))
        stream = torch.cuda.current_stream().cuda_stream
        shared_bytes = 4 * THREADS // 32
        shape = (*grid, 1, THREADS, 1, 1, shared_bytes)
        _driver(
            "cuLaunchKernel", self._function(name), *shape, stream, ctypes.addressof(arguments), 0
        )

    def _find(self, name: str) -> Any:
        found = _driver("cuLibraryGetKernel", self._library, name.encode())
        return importlib.import_module("cuda.bindings.driver").CUfunction(int(found))


def norm_group(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Group:
    """Return the argument of `rms_norm`."""
    group = Group(x=x.data_ptr(), m=x.shape[0], k=x.shape[1], sites=1)
    group.site[0].a, group.site[0].out = weight.data_ptr(), out.data_ptr()
    return group


def gated_group(
    y: Sequence[torch.Tensor], deltas: Sequence[torch.Tensor], out: torch.Tensor
) -> Group:
    """Return the argument of `gated`; y of gate and up have rows equally far apart."""
    group = Group(m=out.shape[0], sites=2)
    for index, each in enumerate(y):
        site = group.site[index]
        site.a, site.n, site.rank = each.data_ptr(), out.shape[1], each.stride(0)
        site.b = deltas[index].data_ptr() if deltas else None
    group.site[0].out = out.data_ptr()
    return group


def _driver(function: str, *args: Any) -> Any:
    """Call a function of the CUDA driver and return its one result, or None."""
    library = importlib.import_module("cuda.bindings.driver")
    status, *results = getattr(library, function)(*args)
    if int(status):
        raise BackendError(f"{function}: {status.name}")
    return results[0] if results else None
