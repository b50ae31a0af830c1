"""The LoRA kernels on a CPU: their very text, compiled by g++ against emulation.h."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.compile_kernels import KERNELS, entry_point
from trt_lora.plugins.group import GroupBuffers, GroupShape
from trt_lora.plugins.kernels import Group, group_of
from trt_lora.plugins.launch import Launch

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "emulation"
FLAGS = ("-x", "c++", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w")
GUARD = 64  # bytes before and behind every buffer
POISON = 0xFF  # as float of any width a NaN

Array = npt.NDArray[Any]


class EmulationError(AssertionError):
    """A kernel broke a rule of CUDA."""


class Range(ctypes.Structure):
    """Memory that a kernel may read and, where it says so, write."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("writable", ctypes.c_int))


class Guarded:
    """A buffer between guard bytes, poisoned where it holds no array."""

    def __init__(self, nbytes: int, content: Array | None = None, shift: int = 0) -> None:
        self.nbytes, self.writable = nbytes, content is None
        self._memory = np.full(nbytes + 2 * GUARD + 128, POISON, np.uint8)
        address = self._memory.ctypes.data
        self._start = GUARD + shift - address % 64 + 64
        if content is not None:
            self.bytes[:] = np.frombuffer(content.tobytes(), np.uint8)
        self._before = self._memory.copy()

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The buffer without its guards."""
        return self._memory[self._start : self._start + self.nbytes]

    @property
    def range(self) -> Range:
        """The buffer as the emulation takes it."""
        return Range(self.address, self.address + self.nbytes, self.writable)

    @property
    def address(self) -> int:
        """Where the buffer begins; a multiple of 64 bytes, plus the shift."""
        return self._memory.ctypes.data + self._start

    def check(self) -> None:
        """Raise if a guard, or an input, is not what it was."""
        after = self._memory.copy()
        if self.writable:
            after[self._start : self._start + self.nbytes] = POISON
        if not np.array_equal(after, self._before):
            raise EmulationError("memory that is not an output was written")


@dataclass(frozen=True)
class Arrays:
    """One call's inputs: x [m, k]; for each site A [k, rank], B [rank, n] and perhaps y [m, n]."""

    x: Array
    a: tuple[Array, ...]
    b: tuple[Array, ...]
    y: tuple[Array, ...] = ()


def run(
    shape: GroupShape,
    arrays: Arrays,
    launches: Sequence[Launch],
    *,
    workspace_bytes: int,
    shift: int = 0,  # bytes by which every buffer misses its alignment
    order: int = 0,  # in which threads run
    library: ctypes.CDLL | None = None,
) -> list[Array]:
    """Return each site's output [m, n] after the launches.

    Raises:
        EmulationError: a kernel broke a rule of CUDA, or wrote where it may not.
    """
    loaded = library or load()

    def place(content: Array) -> Guarded:
        return Guarded(content.nbytes, content, shift)

    x, workspace = place(arrays.x), Guarded(workspace_bytes)
    a, b, y = ([place(each) for each in group] for group in (arrays.a, arrays.b, arrays.y))
    item = arrays.x.dtype.itemsize
    out = [Guarded(shape.m * site.n * item, shift=shift) for site in shape.sites]
    a_, b_, y_, out_ = (tuple(each.address for each in group) for group in (a, b, y, out))
    buffers = GroupBuffers(x.address, a_, b_, y_, out_, workspace.address)
    guarded = [x, workspace, *a, *b, *y, *out]
    for launch in launches:
        emulate(loaded, launch, group_of(shape, buffers, launch.splits), guarded, order)
    for each in guarded:
        each.check()
    return [each.bytes.view(arrays.x.dtype).reshape(shape.m, -1) for each in out]


def emulate(
    library: ctypes.CDLL,
    launch: Launch,
    group: Group,
    guarded: Sequence[Guarded],
    order: int,
) -> None:
    """Run one launch.

    Raises:
        EmulationError: the kernel broke a rule of CUDA.
    """
    message = ctypes.create_string_buffer(500)
    failed = library.emulate(
        ctypes.cast(getattr(library, launch.kernel), ctypes.c_void_p),
        ctypes.byref(group),
        (ctypes.c_int * 3)(*launch.grid),
        launch.block,
        launch.shared_bytes,
        launch.cluster,
        (Range * len(guarded))(*(each.range for each in guarded)),
        len(guarded),
        order,
        message,
        len(message),
    )
    if failed:
        raise EmulationError(f"{launch.kernel}: {message.value.decode()}")


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels as they are in the package."""
    return build(kernel_text(), optimize="-O2")


def kernel_text() -> str:
    """What the GPU is given too: all but device.cuh."""
    folder = files("trt_lora.plugins")
    return "".join(
        folder.joinpath(name).read_text() for name in ("lora.cu", "tiles.cu", "fused_tiles.cu")
    )


def build(
    templates: str, kernels: Iterable[str] = KERNELS, *, optimize: str = "-O0"
) -> ctypes.CDLL:
    """Compile the kernels of a text, unless they have been compiled before."""
    header, end = ((HERE / name).read_text() for name in ("emulation.h", "emulation.cpp"))
    text = "\n".join((header, "#line 1", templates, *map(entry_point, kernels), end))
    target = BUILD / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{optimize}.so"
    if not target.exists():
        _compile(text, target, optimize)
    library = ctypes.CDLL(str(target))
    library.narrow.argtypes = (ctypes.c_float, ctypes.c_int)
    library.narrow.restype = ctypes.c_ushort
    library.widened.argtypes = (ctypes.c_ushort,)
    library.widened.restype = ctypes.c_float
    return library


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    return shutil.which("g++")


def _compile(text: str, target: Path, optimize: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=target.parent)
    os.close(handle)
    command = [compiler() or "g++", *FLAGS, optimize, "-o", unfinished, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        Path(unfinished).unlink()
        raise EmulationError(f"g++ refused the kernels:\n{done.stderr[:4000]}")
    Path(unfinished).replace(target)
