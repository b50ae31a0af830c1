"""Bounded reads of `.npy` files, bfloat16 included, and of arrays alike; never unpickles.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. bfloat16 is stored
as two-byte voids (`|V2`), as TensorRT-LLM's converter does.
"""

import io
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.lib.format as npy_format

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.files.untrusted_file import AdapterFile, ReadBuffer
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

# By dtype and not by its text: a record of two bytes is `|V2` too.
_STORED = {"<f4": "float32", "<f2": "float16", "V2": "bfloat16", "<i4": "int32"}
_DTYPES = {np.dtype(stored): name for stored, name in _STORED.items()}
_MAX_HEADER = 10_000  # numpy's own limit
_READERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


@dataclass(frozen=True)
class NpyFile:
    """An array in a file: what its header says, and a reader of its elements."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int, ReadBuffer | None], Array]  # first element, their number -> [number]


def open_npy(path: Path, dtypes: Collection[str]) -> NpyFile:
    """Read the header and check it against the size of the file.

    Raises:
        AdapterError: the file is missing or damaged, holds Python objects, or none of the dtypes.
    """
    file = AdapterFile(path)
    shape, stored, start = _header(file)
    name = _DTYPES.get(stored, "")
    _check(path, stored, name, dtypes)
    item = storage_dtype(name)
    if file.size != start + math.prod(shape) * item.itemsize:
        raise AdapterError(
            f"{path} has {file.size} bytes, which is not what its shape {list(shape)} takes; "
            "copy or convert the adapter again"
        )

    def read(first: int, count: int, buffer: ReadBuffer | None) -> Array:
        return file.read(start + first * item.itemsize, count * item.itemsize, buffer).view(item)

    return NpyFile(shape, name, read)


def npy_of_array(source: str, array: Array, dtypes: Collection[str]) -> NpyFile:
    """Return an array in memory as if it were in a file; nobody may write to it meanwhile.

    Raises:
        AdapterError: it has none of the dtypes.
    """
    name = _DTYPES.get(array.dtype, array.dtype.name)
    _check(source, array.dtype, name, dtypes)
    item = storage_dtype(name)
    flat = np.ascontiguousarray(array).reshape(-1)
    values = flat.view(item) if flat.dtype == "V2" else flat.astype(item, copy=False)

    def read(first: int, count: int, buffer: ReadBuffer | None) -> Array:
        return values[first : first + count]

    return NpyFile(array.shape, name, read)


def _check(source: object, stored: np.dtype[Any], name: str, dtypes: Collection[str]) -> None:
    if name not in dtypes:
        expected = " or ".join(dtypes)
        raise AdapterError(f"{source} holds {name or repr(stored.str)}, expected {expected}")


def _header(file: AdapterFile) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and the place of the first element."""
    stream = io.BytesIO(file.read(0, min(file.size, 12 + _MAX_HEADER)).tobytes())
    try:
        reader = _READERS[npy_format.read_magic(stream)]
        shape, fortran_order, dtype = reader(stream, max_header_size=_MAX_HEADER)
    except Exception as error:  # of many kinds, for the header is evaluated as a Python literal
        raise AdapterError(
            f"{file.path} is no .npy file of version 1 or 2: {error!s:.200}"
        ) from error
    if fortran_order:
        raise AdapterError(f"{file.path} holds an array in column order; save it in row order")
    if not all(0 <= size < 1 << 63 for size in shape):
        raise AdapterError(f"{file.path} has a shape with a size that no array has")
    return shape, dtype, stream.tell()
