"""Bounded, tensor-by-tensor reads of safetensors files, and their writing.

The safetensors library checks header and offsets; the bytes are read at the offsets it has checked,
because the library maps the file (see `untrusted_file`). Format: 8 bytes little-endian header
length, JSON header, data (https://huggingface.co/docs/safetensors).
"""

import json
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.files.untrusted_file import AdapterFile, Bytes, ReadBuffer
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.tensor import Tensor

_FINGERPRINT = "trt_lora.base_fingerprint"  # key of the metadata

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMBER = ".alpha"  # end of the name of a number beside factors, in whatever dtype it was made
_WIDE = ("float64",)  # which no tensor of an engine is
_NUMBERS = {"I64": "int64", "I32": "int32", "F64": "float64"}
_MAX_NAME = 1024


class _Source(Protocol):
    """Where the bytes of tensors are."""

    def read(self, start: int, size: int, buffer: ReadBuffer | None = None) -> Bytes: ...


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: what the header says, and its elements, which lie row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: _Source
    start: int  # of its bytes in the file

    def part(self, first: int, count: int, buffer: ReadBuffer | None = None) -> Array:
        """Return `count` elements from the element `first` on."""
        item = np.dtype(self.dtype) if self.dtype in _WIDE else storage_dtype(self.dtype)
        start = self.start + first * item.itemsize
        return self.file.read(start, count * item.itemsize, buffer).view(item)

    def read(self, buffer: ReadBuffer | None = None) -> Array:
        """Return all elements in their shape; a `Reader`."""
        return self.part(0, math.prod(self.shape), buffer).reshape(self.shape)

    def blocks(self, most: int) -> Iterator[Array]:
        """Yield the elements row-major, as many at a time."""
        count = math.prod(self.shape)
        for first in range(0, count, most):
            yield self.part(first, min(most, count - first))


@dataclass(frozen=True)
class SafetensorsFile:
    """The tensors of a file in the order of its header, and its metadata."""

    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]

    @property
    def fingerprint(self) -> str | None:
        """That of the base model, in files that this package wrote."""
        return self.metadata.get(_FINGERPRINT)


@dataclass(frozen=True, eq=False)
class _InMemory:
    """The bytes of a tensor that is in no file."""

    data: Bytes

    def read(self, start: int, size: int, buffer: ReadBuffer | None = None) -> Bytes:
        return self.data[start : start + size].copy()


def in_memory(tensors: Mapping[str, Tensor]) -> SafetensorsFile:
    """Return tensors by name as if they had been read from a file; those on a GPU are copied."""
    stored = []
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor.read_storage()).reshape(-1).view(np.uint8)
        stored.append(StoredTensor(name, tensor.shape, tensor.dtype, _InMemory(data), 0))
    return SafetensorsFile(tuple(stored), {})


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read the header; the elements of a tensor are read when they are asked for.

    Raises:
        AdapterError: the file is missing, damaged, or has a dtype that LoRA weights do not have.
    """
    file = AdapterFile(path)
    header, start = _header(file)
    metadata = header.pop("__metadata__", None) or {}
    tensors = []
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        check_tensor(name, shape, path)
        dtypes = _DTYPES | _NUMBERS if name.endswith(_NUMBER) else _DTYPES
        dtype = dtypes.get(entry["dtype"])
        if dtype is None:
            raise AdapterError(
                f"{path}: tensor {name!r} is {entry['dtype']}; "
                f"LoRA weights are one of {', '.join(_DTYPES)}"
            )
        tensors.append(StoredTensor(name, shape, dtype, file, start + entry["data_offsets"][0]))
    return SafetensorsFile(tuple(tensors), metadata)


def check_tensor(name: str, shape: tuple[int, ...], path: Path) -> None:
    """Refuse an empty tensor or an implausible tensor name.

    Raises:
        AdapterError: the tensor is such.
    """
    if 0 in shape:
        raise AdapterError(f"{path}: tensor {name!r:.200} has shape {list(shape)}: no elements")
    if len(name) > _MAX_NAME or not name.isprintable():
        raise AdapterError(f"{path}: {name!r:.200} is not the name of a LoRA factor")


def _header(file: AdapterFile) -> tuple[dict[str, Any], int]:
    """Return the header, which the library has checked, and where the data starts."""
    (size,) = struct.unpack("<Q", file.read(0, 8).tobytes()) if file.size >= 8 else (0,)
    limit = (256 << 10) + file.size // 8  # Python's objects take several times the header's size
    if size > limit:
        raise AdapterError(
            f"{file.path} is not a valid safetensors file (its header has {size} bytes, an "
            f"adapter's of this size at most {limit}); copy or save the adapter again"
        )
    head = file.read(0, min(8 + size, file.size)).tobytes()
    try:
        _check(head, file)
        return json.loads(head[8:]), 8 + size
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise AdapterError(
            f"{file.path} is not a valid safetensors file ({error}); copy or save the adapter again"
        ) from error


def _check(head: bytes, file: AdapterFile) -> None:
    """Let the library check a header, on a copy whose data are holes.

    It maps what it checks, and would end the process when somebody cuts the file meanwhile.
    """
    if sys.platform != "linux":
        _open(file.path)
        return
    with os.fdopen(os.memfd_create("safetensors"), "wb", buffering=0) as copy:
        copy.write(head)
        copy.truncate(file.size)
        _open(Path(f"/proc/self/fd/{copy.fileno()}"))


def _open(path: Path) -> None:
    with safetensors.safe_open(path, framework="np"):
        pass


def save_safetensors(
    tensors: Mapping[str, Tensor], path: Path, fingerprint: str | None = None
) -> None:
    """Write tensors in host memory, and the fingerprint of the base model where it is known.

    Raises:
        OSError: the file cannot be written, such as where the disk is full.
    """
    entries = {
        name: safetensors.TensorSpec(
            dtype=tensor.dtype, shape=tensor.shape, data_ptr=tensor.pointer, data_len=tensor.nbytes
        )
        for name, tensor in tensors.items()
    }
    metadata = {"format": "pt"} | ({_FINGERPRINT: fingerprint} if fingerprint else {})
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.serialize_file(entries, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error
    path.chmod(mode)  # the library's files are for their owner alone, whatever the umask says
