"""The kernels of LoRA: their source, what NVRTC makes of it, and where that is kept on disk."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trt_lora.plugins.cuda_library import checked
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernel_constants import constant_declarations
from trt_lora.plugins.launch import TILE_CTAS, TILES

_FILES = ("device.cuh", "lora.cu", "tiles.cu", "fused_tiles.cu")  # one text; they include nothing
_OPTIONS = ("--std=c++17",)
_DIGEST_BYTES = hashlib.sha256().digest_size


_ELEMENTS = {"float32": "float", "float16": "Float16", "bfloat16": "BFloat16"}

# Every kernel: its name, and the template that is its body.
KERNELS = {
    f"{family}_{dtype}_{rows}": f"{family}<{element}, {rows}>"
    for family in ("fused", "shrink", "expand")
    for dtype, element in _ELEMENTS.items()
    for rows in TILES
} | {
    f"{family}_tiles_{dtype}": f"{family}_tiles<{_ELEMENTS[dtype]}>"
    for family in ("fused", "shrink", "expand")
    for dtype in ("float16", "bfloat16")  # float32 stays exact: no tensor core multiplies it
}


def source() -> str:
    """Return the templates in CUDA C++ that includes no header; `entry_point` makes kernels."""
    folder = files("trt_lora.plugins")
    texts = (folder.joinpath(name).read_text() for name in _FILES)
    return "".join((constant_declarations(), *texts))


def entry_point(kernel: str) -> str:
    """Return the C++ that makes its template a kernel of that name."""
    clusters = "" if kernel.startswith("expand") else "IN_CLUSTERS "
    ctas = TILE_CTAS if "tiles" in kernel else 1  # on a multiprocessor
    return (
        f'extern "C" __global__ void {clusters}__launch_bounds__(THREADS, {ctas}) '
        f"{kernel}(const __grid_constant__ Group group) {{ {KERNELS[kernel]}(group); }}\n"
    )


def compile_ptx(arch: str, kernels: Sequence[str] = tuple(KERNELS)) -> bytes:
    """Return kernels as PTX for `compute_80` or `compute_90`, from the disk if already there.

    A GPU is not needed. PTX of an older architecture runs on every newer one.

    Raises:
        BackendError: NVRTC is missing, or refused the source; with its own log.
    """
    text = source() + "".join(map(entry_point, kernels))
    options = (f"--gpu-architecture={arch}", *_OPTIONS)
    kept = _cache_path(text, options)
    if (ptx := _read_cache(kept)) is None:
        ptx = compile_source(text, options)
        _write_cache(kept, ptx)
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
    text: bytes = b" " * _nvrtc(f"nvrtcGet{kind}Size", program)
    _nvrtc(f"nvrtcGet{kind}", program, text)  # writes into `text`
    return text


def _cache_path(text: str, options: Sequence[str]) -> Path:
    version = str(_nvrtc("nvrtcVersion"))
    key = hashlib.sha256("\0".join((text, *options, version)).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "trt-lora", "ptx", key)


def _read_cache(path: Path) -> bytes | None:
    """What is kept at the path, or None where nothing is or it is damaged."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def _write_cache(path: Path, content: bytes) -> None:
    """Keep the content whole or not at all; a disk that takes nothing costs seconds, no more."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            Path(unfinished).replace(path)
        finally:
            Path(unfinished).unlink(missing_ok=True)


def _nvrtc(function: str, *args: Any) -> Any:
    """Call a function of the run-time compiler and return its results."""
    return checked("nvrtc", function, *args)
