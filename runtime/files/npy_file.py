"""Bounded reads of `.npy` files, bfloat16 included; never unpickles.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. bfloat16 is stored
as two-byte voids (`|V2`), as TensorRT-LLM's converter does.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.files.untrusted_file import AdapterFile
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.read_buffer import ReadBuffer

_DTYPES = {"<f4": "float32", "<f2": "float16", "|V2": "bfloat16", "<i4": "int32"}
_MAX_HEADER = 10_000  # numpy's own limit
_VERSIONS = (b"\x01\x00", b"\x02\x00", b"\x03\x00")

# What numpy and its imitators in C++ write. numpy's own reader evaluates the header as Python, with
# warnings, and refuses it with exceptions of many kinds.
_HEADER = re.compile(
    rb"\{'descr': '(?P<descr>[<>|=]\w{1,8})', 'fortran_order': (?P<columns>True|False), "
    rb"'shape': \((?P<shape>(\d{1,18}, ?)*(\d{1,18})?)\),? *\}\s*"
)


@dataclass(frozen=True)
class NpyFile:
    """An array in a file: what its header says, and a reader of its elements."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int, ReadBuffer | None], Array]  # first element, their number -> [number]


def open_npy(path: Path) -> NpyFile:
    """Read the header and check it against the size of the file.

    Raises:
        AdapterError: the file is missing or damaged, holds Python objects, or another dtype.
    """
    file = AdapterFile(path)
    shape, descr, start = _header(file)
    name = _DTYPES.get(descr)
    if name is None:
        raise AdapterError(f"{path} holds {descr!r}; expected one of {', '.join(_DTYPES)}")
    item = storage_dtype(name)
    if file.size != start + math.prod(shape) * item.itemsize:
        raise AdapterError(
            f"{path} has {file.size} bytes, which is not what its shape {list(shape)} takes; "
            "copy or convert the adapter again"
        )

    def read(first: int, count: int, buffer: ReadBuffer | None) -> Array:
        return file.read(start + first * item.itemsize, count * item.itemsize, buffer).view(item)

    return NpyFile(shape, name, read)


def _header(file: AdapterFile) -> tuple[tuple[int, ...], str, int]:
    """Shape, type and the place of the first element."""
    start = file.read(0, min(file.size, 12)).tobytes()
    width = 2 if start[6:8] == b"\x01\x00" else 4  # bytes of the header's length
    if start[:6] != b"\x93NUMPY" or start[6:8] not in _VERSIONS or len(start) < 8 + width:
        raise AdapterError(f"{file.path} is not a valid .npy file of version 1, 2 or 3")
    size = int.from_bytes(start[8 : 8 + width], "little")
    header = file.read(8 + width, min(size, _MAX_HEADER)).tobytes()
    match = _HEADER.fullmatch(header)
    if match is None:
        raise AdapterError(f"{file.path}: {header[:200]!r} is not the header of a plain array")
    if match["columns"] == b"True":
        raise AdapterError(f"{file.path} holds an array in column order; save it in row order")
    shape = tuple(int(part) for part in match["shape"].split(b",") if part.strip())
    return shape, match["descr"].decode(), 8 + width + size
