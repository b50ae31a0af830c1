"""The kernels on a CPU: their very text, compiled by g++ against emulation/emulation.h."""

import ctypes
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from filelock import FileLock
from kernels.call_buffers import CallBuffers
from kernels.calls import Call
from kernels.guarded_buffer import Guarded, HostMemory

from trt_lora.plugins.kernels.constants import constant_declarations
from trt_lora.plugins.kernels.group_call import GroupBuffers
from trt_lora.plugins.kernels.launch_plan import Launch
from trt_lora.plugins.kernels.launcher import group_of
from trt_lora.plugins.kernels.nvrtc import KERNELS, SLOT_KERNELS, entry_point
from trt_lora.runtime.memory.dtypes import Array

EMULATION = Path(__file__).parent / "emulation"
_HEADER = EMULATION / "emulation.h"
BUILD = Path(__file__).parents[2] / "build" / "emulation"
# Unique symbols would be shared between all libraries of a process; each calls its own functions.
FLAGS = (
    *("-std=c++17", "-ffp-contract=off", "-fPIC", "-w"),
    *("-fno-gnu-unique", "-fno-semantic-interposition"),
)
# ThreadSanitizer without its library, which -nodefaultlibs leaves out: its calls reach memory.cpp.
_WATCHED = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
_LIBRARY = ("-shared", "-Wl,-Bsymbolic", "-nodefaultlibs", "-lstdc++", "-lgcc_s", "-lc")


class EmulationError(AssertionError):
    """A kernel broke a rule of CUDA."""


class Range(ctypes.Structure):
    """Memory that a kernel may read and, where it says so, write."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("writable", ctypes.c_int))


def range_of(buffer: Guarded) -> Range:
    """Return the buffer as the emulation takes it; only what is no input may be written."""
    return Range(buffer.address, buffer.address + buffer.nbytes, buffer.content is None)


def run(
    call: Call,
    launches: Sequence[Launch],
    *,
    shift: int = 0,  # bytes by which every buffer misses its alignment
    order: int = 0,  # in which threads run
    library: ctypes.CDLL | None = None,
) -> list[Array]:
    """Return each site's output [m, n] after the launches.

    Raises:
        EmulationError: a kernel broke a rule of CUDA.
        AssertionError: it wrote where it may not.
    """
    with CallBuffers(call, HostMemory(), shift=shift) as placed:
        ranges = [range_of(each) for each in placed.all()]

        def launch_all(buffers: GroupBuffers) -> None:
            for launch in launches:
                group = group_of(call.shape, buffers, launch.splits)
                kernels = library or load(has_slots=launch.kernel in SLOT_KERNELS)
                emulate(kernels, launch, group, ranges, order)

        return placed.run(launch_all)


def emulate(
    library: ctypes.CDLL,
    launch: Launch,
    argument: ctypes.Structure,
    ranges: Sequence[Range],
    order: int = 0,
) -> None:
    """Run one launch, which may touch these ranges.

    Raises:
        EmulationError: the kernel broke a rule of CUDA.
    """
    message = ctypes.create_string_buffer(500)
    failed = library.emulate(
        ctypes.cast(getattr(library, launch.kernel), ctypes.c_void_p),
        ctypes.byref(argument),
        (ctypes.c_int * 3)(*launch.grid),
        launch.block,
        launch.shared_bytes,
        launch.cluster,
        (Range * len(ranges))(*ranges),
        len(ranges),
        order,
        message,
        len(message),
    )
    if failed:
        raise EmulationError(f"{launch.kernel}: {message.value.decode()}")


@functools.cache
def load(*, has_slots: bool = False) -> ctypes.CDLL:
    """The kernels as they are in the package."""
    kernels = SLOT_KERNELS if has_slots else KERNELS
    return build(kernel_text(has_slots=has_slots), kernels, optimize="-O2")


def kernel_text(*, has_slots: bool = False) -> str:
    """What the GPU is given too: all but device.cuh."""
    folder = files("trt_lora.plugins.kernels")
    names = (
        "cuda_cores.cu",
        "tensor_cores.cu",
        "tensor_cores_fused.cu",
        "tensor_cores_decode.cu",
        *(["slots.cu"] if has_slots else ()),
    )
    texts = (folder.joinpath(name).read_text() for name in names)
    return "".join((constant_declarations(has_slots=has_slots), *texts))


def build(
    templates: str, kernels: Iterable[str] = KERNELS, *, optimize: str = "-O0"
) -> ctypes.CDLL:
    """Compile the LoRA kernels of a text, unless they have been compiled before."""
    texts = (templates, *map(entry_point, kernels), (EMULATION / "group.cpp").read_text())
    return build_texts(texts, optimize=optimize)


def build_texts(texts: Iterable[str], *, optimize: str = "-O0") -> ctypes.CDLL:
    """Compile templates, kernels and what names their `Argument`, unless compiled before."""
    header = _precompiled_header(optimize)
    objects = [str(_object(name)) for name in ("fibers.cpp", "memory.cpp")]
    text = "\n".join(("#line 1", *texts, (EMULATION / "emulate.cpp").read_text()))
    source = BUILD / f"{_digest(header.name, *objects, text)}.cpp"
    target = source.with_suffix(".so")
    options = (*_WATCHED, optimize, "-include", str(header), *objects, *_LIBRARY)
    _compile(source, text, target, options)
    library = ctypes.CDLL(str(target))
    library.narrow.argtypes = (ctypes.c_float, ctypes.c_int)
    library.narrow.restype = ctypes.c_ushort
    library.widened.argtypes = (ctypes.c_ushort,)
    library.widened.restype = ctypes.c_float
    return library


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    return shutil.which("g++")


def _precompiled_header(optimize: str) -> Path:
    """The header, and beside it what the compiler takes in its place: half the time to compile."""
    text = _HEADER.read_text()
    header = BUILD / f"{_digest(optimize, text)}.h"
    _compile(header, text, Path(f"{header}.gch"), (*_WATCHED, optimize))
    return header


def _object(name: str) -> Path:
    """What is the same for all kernels, compiled once; none of it is watched."""
    text = (EMULATION / name).read_text()
    source = BUILD / f"{_digest(_HEADER.read_text(), text)}.cpp"
    target = source.with_suffix(".o")
    _compile(source, text, target, ("-O2", "-c", f"-I{EMULATION}"))
    return target


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join((*FLAGS, *_WATCHED, *texts)).encode()).hexdigest()[:24]


def _compile(source: Path, text: str, target: Path, options: Sequence[str]) -> None:
    """Write and compile a text once, whichever of the processes that run the tests comes first."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.exists():
            return
        source.write_text(text)
        unfinished = f"{target}.unfinished"
        command = [compiler() or "g++", *FLAGS, str(source), "-o", unfinished, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulationError(f"g++ refused the kernels:\n{done.stderr[:4000]}")
        Path(unfinished).replace(target)
