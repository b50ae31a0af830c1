"""Read `.npy` files row by row, never a pickle, bfloat16 included.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html. bfloat16 is stored
as two-byte voids (`|V2`), as TensorRT-LLM's converter does.
"""

import io
import math
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapter_file import AdapterFile
from trt_lora.runtime.tensors import Array, storage_dtype

_DTYPES = {"<f4": "float32", "<f2": "float16", "|V2": "bfloat16", "<i4": "int32"}
_MAX_HEADER = 1 << 14


@dataclass(frozen=True)
class NpyFile:
    """An array in a file: what its header says, and a reader of its elements."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Array]  # (first element, number of elements) -> [number]


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

    def read(first: int, count: int) -> Array:
        return file.read(start + first * item.itemsize, count * item.itemsize).view(item)

    return NpyFile(shape, name, read)


def _header(file: AdapterFile) -> tuple[tuple[int, ...], str, int]:
    """Shape, type and the place of the first element."""
    stream = io.BytesIO(file.read(0, min(file.size, _MAX_HEADER)).tobytes())
    try:
        version = npy.read_magic(stream)
        reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, in_columns, dtype = reader(stream)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError,
            UnicodeError, KeyError, OverflowError) as error:  # fmt: skip
        raise AdapterError(f"{file.path} is not a valid .npy file: {error}") from error
    if in_columns or any(size < 0 for size in shape):
        raise AdapterError(f"{file.path}: an array in column order or with a negative size")
    return shape, np.dtype(dtype).str, stream.tell()
