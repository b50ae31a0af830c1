"""Elementwise kernels between a layer's GEMMs: norm, QKV split, SiLU gate.

TensorRT fuses the residual into the norm, and LoRA's deltas into what reads q, k, v, gate and up;
torch takes two to six kernels for each. With torch's, a base step would be slower than an engine's,
and LoRA's share too small.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from trt_lora.plugins.cuda_bindings import bindings, checked
from trt_lora.plugins.kernels.launcher import KernelGroup
from trt_lora.plugins.kernels.nvrtc import compile_source, source
from trt_lora.scripts.bench.gpu.machine import architecture

# The argument is the struct `Group` of cuda_cores.cu, so that the tests can emulate these too.
# rms_norm: residual [m, k] site 1's out, weight [k] site 0's a, product [m, k] site 0's b or null,
#   out [m, k] site 0's out. Grid: [m].
# split: for each site y a [m, stride rank], perhaps a delta b [m, n], out [m, n]. Grid:
#   [largest n / 2048, m].
# gated: for gate and up y a [m, stride rank] and perhaps a delta b [m, n]. Grid: [n / 2048, m].
TEXT = """
template <class T> DEVICE Pack sum_of(const Pack& one, const Pack& other) {
  Pack to = {};
  for (int j = 0; j < 8; ++j) {
    T rounded;
    round_to(rounded, element(one, j, T{}) + element(other, j, T{}));
    put(to, j, rounded);
  }
  return to;
}

template <class T> DEVICE void rms_norm(const Group& group) {
  const T* weight = static_cast<const T*>(group.site[0].a);
  const long long row = offset(blockIdx.x, group.k);
  const T* product = static_cast<const T*>(group.site[0].b);
  T* residual = static_cast<T*>(group.site[1].out) + row;
  T* out = static_cast<T*>(group.site[0].out) + row;
  float* sums = reinterpret_cast<float*>(shared_memory());
  float sum = 0.0f;
  for (int i = threadIdx.x * 8; i < group.k; i += THREADS * 8) {
    Pack pack = read16(residual + i);
    if (product) {
      pack = sum_of<T>(pack, read16(product + row + i));
      write16(residual + i, pack);
    }
    for (int j = 0; j < 8; ++j) sum += element(pack, j, T{}) * element(pack, j, T{});
  }
  for (int mask = 16; mask >= 1; mask /= 2) sum += shuffle_xor(sum, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < THREADS / 32; ++warp) total += sums[warp];
  const float scale = 1.0f / sqrtf(total / group.k + 1e-5f);
  for (int i = threadIdx.x * 8; i < group.k; i += THREADS * 8) {
    const Pack pack = read16(residual + i), by = read16(weight + i);
    Pack to = {};
    for (int j = 0; j < 8; ++j) {
      T rounded;
      round_to(rounded, element(pack, j, T{}) * scale * element(by, j, T{}));
      put(to, j, rounded);
    }
    write16(out + i, to);
  }
}

template <class T> DEVICE void split(const Group& group) {
  const int row = blockIdx.y, i = (blockIdx.x * THREADS + threadIdx.x) * 8;
  for (int s = 0; s < group.sites; ++s) {
    const Site& site = group.site[s];
    if (i >= site.n) continue;
    const long long dense = offset(row, site.n) + i;
    Pack y = read16(static_cast<const T*>(site.a) + offset(row, site.rank) + i);
    if (site.b) y = sum_of<T>(y, read16(static_cast<const T*>(site.b) + dense));
    write16(static_cast<T*>(site.out) + dense, y);
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
Tensors = Sequence[torch.Tensor]

ELEMENTS = {torch.float16: "Float16", torch.bfloat16: "BFloat16"}
THREADS = 256
STRIP = 8  # elements of 16 bytes


def entry_points(element: str) -> str:
    """Return the C++ that makes the templates above kernels for one type of element."""
    bodies = {
        "rms_norm": f"rms_norm<{element}>(group);",
        "split": f"split<{element}>(group);",
        "gated": f"gated<{element}>(group);",
        "nothing": "",
        "IN_CLUSTERS nothing_in_clusters": "",
    }
    return "".join(
        f'extern "C" __global__ void {name}(const __grid_constant__ Group group) {{ {body} }}\n'
        for name, body in bodies.items()
    )


class ElementwiseKernels(Protocol):
    """The kernels, on tensors."""

    def rms_norm(
        self,
        residual: torch.Tensor,
        product: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Add the product to the residual [m, k]; write `residual / rms * weight`, return that."""
        ...

    def split(self, y: Tensors, deltas: Tensors, outs: Tensors) -> Tensors:
        """Write every `y + delta` [m, n] to its own dense tensor, and return those."""
        ...

    def gated(self, y: Tensors, deltas: Tensors, out: torch.Tensor) -> torch.Tensor:
        """Write `silu(gate) * up` [m, n] to `out`, and return it; deltas are added before."""
        ...

    def nothing(self, *, clusters: bool = False) -> None:
        """Launch a kernel that does nothing: what a node of a graph costs."""
        ...


class CudaElementwiseKernels:
    """The kernels on a GPU, on torch's current stream."""

    def __init__(self, dtype: torch.dtype, capability: tuple[int, int]) -> None:
        """Compile for a type of element; takes half a second.

        Raises:
            BackendError: NVRTC is missing, or refused the text.
        """
        text = source() + TEXT + entry_points(ELEMENTS[dtype])
        options = (f"--gpu-architecture={architecture(capability)}", "--std=c++17")
        ptx = compile_source(text, options)
        self._library = checked("driver", "cuLibraryLoadData", ptx, [], [], 0, [], [], 0)
        self._function = functools.cache(self._find)

    def rms_norm(
        self,
        residual: torch.Tensor,
        product: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See `ElementwiseKernels`."""
        self._launch("rms_norm", norm_group(residual, product, weight, out), (len(out), 1))
        return out

    def split(self, y: Tensors, deltas: Tensors, outs: Tensors) -> Tensors:
        """See `ElementwiseKernels`."""
        widest = max(out.shape[1] for out in outs)
        group = split_group(y, deltas, outs)
        self._launch("split", group, (-(-widest // (STRIP * THREADS)), len(outs[0])))
        return outs

    def gated(self, y: Tensors, deltas: Tensors, out: torch.Tensor) -> torch.Tensor:
        """See `ElementwiseKernels`."""
        m, n = out.shape
        self._launch("gated", gated_group(y, deltas, out), (-(-n // (STRIP * THREADS)), m))
        return out

    def nothing(self, *, clusters: bool = False) -> None:
        """See `ElementwiseKernels`."""
        name = "nothing_in_clusters" if clusters else "nothing"
        self._launch(name, KernelGroup(), (8, 1))  # one cluster

    def _launch(self, name: str, group: KernelGroup, grid: tuple[int, int]) -> None:
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(group))
        stream = torch.cuda.current_stream().cuda_stream
        shared_bytes = 4 * THREADS // 32
        shape = (*grid, 1, THREADS, 1, 1, shared_bytes, stream)
        function, address = self._function(name), ctypes.addressof(arguments)
        checked("driver", "cuLaunchKernel", function, *shape, address, 0)

    def _find(self, name: str) -> Any:
        kernel = checked("driver", "cuLibraryGetKernel", self._library, name.encode())
        return bindings("driver").CUfunction(int(kernel))


def norm_group(
    residual: torch.Tensor, product: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor
) -> KernelGroup:
    """Return the argument of `rms_norm`."""
    group = KernelGroup(m=residual.shape[0], k=residual.shape[1], sites=2)
    group.site[0].a, group.site[0].out = weight.data_ptr(), out.data_ptr()
    group.site[0].b = None if product is None else product.data_ptr()
    group.site[1].out = residual.data_ptr()
    return group


def split_group(y: Tensors, deltas: Tensors, outs: Tensors) -> KernelGroup:
    """Return the argument of `split`."""
    group = KernelGroup(m=len(outs[0]), sites=len(outs))
    for index, (each, out) in enumerate(zip(y, outs, strict=True)):
        site = group.site[index]
        site.a, site.n, site.rank = each.data_ptr(), out.shape[1], each.stride(0)
        site.b = deltas[index].data_ptr() if deltas else None
        site.out = out.data_ptr()
    return group


def gated_group(y: Tensors, deltas: Tensors, out: torch.Tensor) -> KernelGroup:
    """Return the argument of `gated`."""
    group = split_group(y, deltas, (out,) * 2)
    group.site[1].out = None
    return group
