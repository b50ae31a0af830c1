"""CUDA kernel of an operator, with the argument order of TensorRT's ahead-of-time plugins.

LoraAdd2    x a_0 b_0 a_1 b_1 c_0 c_1   m k n_0 rank_0 n_1 rank_1   out_0 out_1
"""

import functools

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.kernels.nvrtc import KERNELS, compile_source, source


def kernel_parameters(operator: Operator) -> tuple[tuple[str, str], ...]:
    """Return (C++ type, name) of every argument of an operator's kernel, in TensorRT's order."""
    sites = range(operator.sites)
    sizes = ("m", "k", *(name for site in sites for name in (f"n_{site}", f"rank_{site}")))
    return (
        *(("const void*", name) for name in operator.input_names),
        *(("int", name) for name in sizes),
        *(("void*", f"out_{site}") for site in sites),
    )


def kernel_source(operator: Operator, dtype: str, rows: int) -> tuple[str, str]:
    """Return (name, C++) of an operator's kernel, to stand behind `kernels.source()`.

    `dtype` is that of every tensor, and `rows` of x, one of `launch.TILES`, are for one CTA.
    """
    name = f"{operator.name}_{dtype}_{rows}"
    parameters = ", ".join(" ".join(each) for each in kernel_parameters(operator))
    ranks = [f"rank_{i}" for i in range(operator.sites)]
    addends = [f"c_{i}" if operator.has_addend else "nullptr" for i in range(operator.sites)]
    sites = "".join(
        f"  group.site[{i}] = {{a_{i}, b_{i}, {addends[i]}, out_{i}, "
        f"n_{i}, rank_{i}, {' + '.join(ranks[:i]) or '0'}}};\n"
        for i in range(operator.sites)
    )
    # What `fused` does not read stays unset: every thread has a copy.
    return name, (
        'extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) '
        f"{name}({parameters}) {{\n"
        "  Group group;\n  group.x = x;\n  group.m = m;\n  group.k = k;\n"
        f"  group.sites = {operator.sites};\n  group.total_rank = {' + '.join(ranks)};\n{sites}"
        f"  {KERNELS[f'fused_{dtype}_{rows}']}(group);\n}}\n"
    )


@functools.cache  # the next engine asks for the same few
def kernel_ptx(operator: Operator, dtype: str, rows: int, arch: str) -> tuple[str, bytes]:
    """Return (name, PTX) of `kernel_source` for `compute_80` or `compute_90`; needs no GPU.

    Raises:
        BackendError: NVRTC is missing.
    """
    name, kernel = kernel_source(operator, dtype, rows)
    ptx = compile_source(source() + kernel, (f"--gpu-architecture={arch}", "--std=c++17"))
    return name, ptx.rstrip(b"\0")  # TensorRT takes the length, without C's end of a string
