"""Source of the LoRA kernels, and its compilation to PTX with NVRTC and a disk cache."""

import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trt_lora.plugins.cuda_bindings import checked
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.file_cache import FileCache
from trt_lora.plugins.kernels.constants import constant_declarations
from trt_lora.plugins.kernels.launch_plan import TILE_CTAS, TILES

_FILES = (
    "device.cuh",
    "cuda_cores.cu",
    "tensor_cores.cu",
    "tensor_cores_fused.cu",
    "tensor_cores_decode.cu",
)  # one text; they include nothing
_SLOTS_FILE = "slots.cu"  # behind them in the text of kernels for rows with adapters of their own
_OPTIONS = ("--std=c++17",)
_CACHE_BYTES = 64 << 20  # the kernels of one release, for both architectures, are some 9 MB


# Of a thread: two CTAs of the kernels for few rows share a multiprocessor. A pass takes some more.
DECODE_REGISTERS, SLOT_DECODE_REGISTERS = 96, 128

SLOTS = "slots_"  # begins the name of a kernel for rows with adapters of their own
ELEMENTS = {"float32": "float", "float16": "Float16", "bfloat16": "BFloat16"}

# Every kernel: its name, and the template that is its body.
KERNELS = (
    {
        f"{family}_{dtype}_{rows}": f"{family}<{element}, {rows}>"
        for family in ("fused", "shrink", "expand")
        for dtype, element in ELEMENTS.items()
        for rows in TILES
    }
    | {
        f"{family}_tiles_{dtype}": f"{family}_tiles<{ELEMENTS[dtype]}>"
        for family in ("fused", "shrink", "expand")
        for dtype in ("float16", "bfloat16")  # float32 stays exact: no tensor core multiplies it
    }
    | {f"decode_{dtype}": f"decode<{ELEMENTS[dtype]}>" for dtype in ("float16", "bfloat16")}
)
SLOT_KERNELS = {SLOTS + name: SLOTS + template for name, template in KERNELS.items()}


def kernels_of(dtype: str, *, has_slots: bool) -> tuple[str, ...]:
    """Return the names of all kernels that nodes of a dtype may launch."""
    kernels = SLOT_KERNELS if has_slots else KERNELS
    return tuple(name for name in kernels if f"_{dtype}" in name)


def source(*, has_slots: bool = False) -> str:
    """Return the templates in CUDA C++ that includes no header; `entry_point` makes kernels.

    Args:
        has_slots: those of `SLOT_KERNELS`, not of `KERNELS`.
    """
    folder = files("trt_lora.plugins.kernels")
    names = (*_FILES, *([_SLOTS_FILE] if has_slots else ()))
    texts = (folder.joinpath(name).read_text() for name in names)
    return "".join((constant_declarations(has_slots=has_slots), *texts))


def entry_point(kernel: str) -> str:
    """Return the C++ that makes its template a kernel of that name."""
    family, body = kernel.removeprefix(SLOTS), (KERNELS | SLOT_KERNELS)[kernel]
    clusters = "" if family.startswith("expand") else "IN_CLUSTERS "
    ctas = TILE_CTAS if "tiles" in kernel else 1  # on a multiprocessor
    bounds = f"__launch_bounds__(THREADS, {ctas})"
    if family.startswith("decode"):  # the two exclude each other
        registers = SLOT_DECODE_REGISTERS if kernel in SLOT_KERNELS else DECODE_REGISTERS
        bounds = f"__maxnreg__({registers})"
    return (
        f'extern "C" __global__ void {clusters}{bounds} '
        f"{kernel}(const __grid_constant__ Group group) {{ {body}(group); }}\n"
    )


def compile_ptx(arch: str, kernels: Sequence[str] = tuple(KERNELS)) -> bytes:
    """Return kernels as PTX for `compute_80` or `compute_90`, from the disk if already there.

    A GPU is not needed. PTX of an older architecture runs on every newer one.

    Args:
        arch: one of the two.
        kernels: of `KERNELS`, or of `SLOT_KERNELS`.

    Raises:
        BackendError: NVRTC is missing, or refused the source; with its own log.
    """
    templates = source(has_slots=kernels[0] in SLOT_KERNELS)
    return cached_ptx(arch, templates + "".join(map(entry_point, kernels)))


def cached_ptx(arch: str, text: str) -> bytes:
    """Return CUDA C++ as PTX for an architecture, from the disk if already there.

    Raises:
        BackendError: NVRTC is missing, or refused the text; with its own log.
    """
    options = (f"--gpu-architecture={arch}", *_OPTIONS)
    cache, key = _cache(), _key(text, options)
    if (ptx := cache.get(key)) is None:
        ptx = compile_source(text, options)
        cache.put(key, ptx)
    return ptx


def compile_source(text: str, options: Sequence[str]) -> bytes:
    """Return what NVRTC makes of CUDA C++: PTX, or a cubin where the architecture is an `sm_`.

    Raises:
        BackendError: NVRTC is missing, or refused the source; with its own log.
    """
    program = _nvrtc("nvrtcCreateProgram", text.encode(), b"lora.cu", 0, [], [])
    try:
        _nvrtc("nvrtcCompileProgram", program, len(options), [text.encode() for text in options])
        kind = "CUBIN" if any("=sm_" in option for option in options) else "PTX"
        return _output(kind, program)
    except BackendError as error:
        raise BackendError(f"{error}\n{_output('ProgramLog', program).decode()}") from error
    finally:
        _nvrtc("nvrtcDestroyProgram", program)


def _output(kind: str, program: Any) -> bytes:
    text = bytearray(_nvrtc(f"nvrtcGet{kind}Size", program))
    _nvrtc(f"nvrtcGet{kind}", program, text)  # writes into it, as nothing may into `bytes`
    return bytes(text)


def _cache() -> FileCache:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return FileCache(Path(folder, "trt-lora", "ptx"), _CACHE_BYTES)


def _key(text: str, options: Sequence[str]) -> str:
    version = str(_nvrtc("nvrtcVersion"))
    return hashlib.sha256("\0".join((text, *options, version)).encode()).hexdigest()


def _nvrtc(function: str, *args: Any) -> Any:
    """Call a function of the run-time compiler and return its results."""
    return checked("nvrtc", function, *args)
