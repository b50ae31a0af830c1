"""Source of the LoRA kernels, and its compilation with NVRTC and a disk cache."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trt_lora.plugins.cuda_bindings import checked
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.file_cache import FileCache
from trt_lora.plugins.kernels.constants import (
    DECODE_TILES,
    ROW_TILE,
    SLOT_DECODE_TILES,
    constant_declarations,
)
from trt_lora.plugins.kernels.launch_plan import TILE_CTAS, TILES, Chip

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


# Of a thread: two CTAs of the kernels for few rows share a multiprocessor. A pass, or more than one
# row tile, takes some more.
DECODE_REGISTERS, MOST_DECODE_REGISTERS = 96, 128

SLOTS = "slots_"  # begins the name of a kernel for rows with adapters of their own
ELEMENTS = {"float32": "float", "float16": "Float16", "bfloat16": "BFloat16"}


def _decode_kernels(every_tiles: Iterable[int]) -> dict[str, str]:
    return {
        f"decode_{dtype}_{tiles * ROW_TILE}": f"decode<{ELEMENTS[dtype]}, {tiles}>"
        for dtype in ("float16", "bfloat16")
        for tiles in every_tiles
    }


# Every kernel: its name, and the template that is its body.
_OF_ANY_ROWS = {
    f"{family}_{dtype}_{rows}": f"{family}<{element}, {rows}>"
    for family in ("fused", "shrink", "expand")
    for dtype, element in ELEMENTS.items()
    for rows in TILES
} | {
    f"{family}_tiles_{dtype}": f"{family}_tiles<{ELEMENTS[dtype]}>"
    for family in ("fused", "shrink", "expand")
    for dtype in ("float16", "bfloat16")  # float32 stays exact: no tensor core multiplies it
}
KERNELS = _OF_ANY_ROWS | _decode_kernels(DECODE_TILES)
SLOT_KERNELS = {
    SLOTS + name: SLOTS + template
    for name, template in (_OF_ANY_ROWS | _decode_kernels(SLOT_DECODE_TILES)).items()
}


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
        is_small = kernel in KERNELS and kernel.endswith(f"_{ROW_TILE}")
        registers = DECODE_REGISTERS if is_small else MOST_DECODE_REGISTERS
        bounds = f"__maxnreg__({registers})"
    return (
        f'extern "C" __global__ void {clusters}{bounds} '
        f"{kernel}(const __grid_constant__ Group group) {{ {body}(group); }}\n"
    )


def architecture_of(chip: Chip) -> str:
    """Return what kernels are compiled for: the GPU's machine code, where NVRTC knows it.

    Else PTX, of an older architecture, which the GPU's driver compiles once more, and anew after
    each update.

    Raises:
        BackendError: NVRTC is missing.
    """
    major, minor = chip.compute_capability
    if (number := 10 * major + minor) in _nvrtc("nvrtcGetSupportedArchs"):
        return f"sm_{number}"
    return "compute_90" if chip.cluster > 1 else "compute_80"


def compile_lora(arch: str, kernels: Sequence[str] = tuple(KERNELS)) -> bytes:
    """Return kernels for an architecture, from the disk if already there; no GPU is needed.

    Args:
        arch: as `architecture_of` returns it.
        kernels: of `KERNELS`, or of `SLOT_KERNELS`.

    Raises:
        BackendError: NVRTC is missing, or refused the source; with its own log.
    """
    templates = source(has_slots=kernels[0] in SLOT_KERNELS)
    return cached_code(arch, templates + "".join(map(entry_point, kernels)))


def cached_code(arch: str, text: str) -> bytes:
    """Return what NVRTC makes of CUDA C++ for an architecture, from the disk if already there.

    Raises:
        BackendError: NVRTC is missing, or refused the text; with its own log.
    """
    options = (f"--gpu-architecture={arch}", *_OPTIONS)
    cache, key = _cache(), _key(text, options)
    if (code := cache.get(key)) is None:
        code = compile_source(text, options)
        cache.put(key, code)
    return code


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
