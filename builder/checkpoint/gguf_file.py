"""A GGUF file: what it says of its model, and where each of its tensors lies.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Nothing
is allocated by a count of the file that its size does not allow.
"""

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from struct import calcsize, unpack
from typing import Any

from trt_lora.builder.checkpoint.model_directory import NEXT_STEP, check_content
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown

FLOATS = ("F16", "BF16", "F32")

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_NUMBERS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", 10))  # struct's, by value types
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_LEAST_TENSOR, _LEAST_VALUE = 32, 13  # bytes in the header
# Values and bytes of a block, of the tensors that are read.
_BLOCKS = {
    "Q4_0": (32, 18),
    "Q8_0": (32, 34),
    "Q6_K": (256, 210),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F32": (1, 4),
}
# https://github.com/ggml-org/ggml/blob/master/include/ggml.h (`ggml_type`), in their order.
_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", "4", "5", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K"),
    *("Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S"),
    *("IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "31", "32", "33"),
    *("TQ1_0", "TQ2_0", "36", "37", "38", "MXFP4", "NVFP4"),
)


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file."""

    type: str  # such as Q4_0
    shape: tuple[int, ...]  # as torch has it: the values of the last dimension lie side by side
    start: int  # byte of the file

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Its shape with bytes in the place of values."""
        values, nbytes = _BLOCKS[self.type]
        return *self.shape[:-1], self.shape[-1] // values * nbytes

    @property
    def end(self) -> int:
        """The byte of the file behind it."""
        return self.start + math.prod(self.byte_shape)


@dataclass(frozen=True)
class GgufFile:
    """What the header of a file says."""

    path: Path
    metadata: Mapping[str, Any]  # numbers and strings; of an array, how long it is, in words
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file; of its tensors no byte.

    Raises:
        ModelError: it is none of these files, damaged, incomplete, or has tensors of another type.
    """
    check_content(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(path, data).read()


@dataclass(frozen=True)
class _Header:
    """A file whose next bytes are taken one behind the other."""

    path: Path
    data: mmap.mmap

    def read(self) -> GgufFile:
        if self.take(4) != _MAGIC:
            raise self.damaged("it does not begin with GGUF")
        if (version := self.number("I")) not in _VERSIONS:
            order = "" if version & 0xFFFF else ", little-endian, which this file is not"
            raise self.damaged(f"its version is {version}, and 2 or 3 is read{order}")
        tensors, values = self.number("Q"), self.number("Q")
        if tensors * _LEAST_TENSOR + values * _LEAST_VALUE > len(self.data):
            raise self.damaged(f"it is too small for {tensors} tensors and {values} values")
        metadata = self.unique((self.text(), self.value(self.number("I"))) for _ in range(values))
        found = self.unique(self.tensor() for _ in range(tensors))
        return GgufFile(self.path, metadata, self.placed(found, metadata))

    def damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or no GGUF file: {reason}; {NEXT_STEP}")

    def skip(self, nbytes: int) -> None:
        if nbytes > len(self.data) - self.data.tell():
            raise self.damaged(f"its header is cut off by its end, at byte {len(self.data)}")
        self.data.seek(nbytes, 1)

    def take(self, nbytes: int) -> bytes:
        self.skip(nbytes)
        return self.data[self.data.tell() - nbytes : self.data.tell()]

    def number(self, code: str) -> Any:
        return unpack(f"<{code}", self.take(calcsize(f"<{code}")))[0]

    def text(self) -> str:
        text = self.take(self.number("Q"))
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{shown(text)} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind != _STRING:
            raise self.damaged(f"type {kind} of a value is not known")
        return self.text()

    def array(self, kind: int, count: int) -> str:
        """Skip an array: none that is read is needed, and vocabularies are long."""
        if kind in _NUMBERS:
            self.skip(count * calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:  # llama.cpp takes none in an array either
            raise self.damaged(f"type {kind} of an array's values is not read")
        return f"an array of {count}"

    def tensor(self) -> tuple[str, GgufTensor]:
        """The entry of a tensor; it starts where the data of all do, and an offset."""
        name, count = self.text(), self.number("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise self.damaged(f"{shown(name)} has {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        number, offset = self.number("I"), self.number("Q")
        kind = _TYPES[number] if number < len(_TYPES) else str(number)
        if kind not in _BLOCKS:
            raise ModelError(
                f"{self.path}: {shown(name)} is of type {kind}, and {', '.join(_BLOCKS)} are read; "
                "quantise the model anew with llama-quantize to Q4_0 or Q8_0, or pass its "
                "safetensors"
            )
        if shape[-1] % _BLOCKS[kind][0] or 0 in shape:
            raise self.damaged(f"{shown(name)} {[*shape]} is not whole blocks of {kind}")
        return name, GgufTensor(kind, shape, offset)

    def unique(self, items: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        found = dict[str, Any]()
        for name, item in items:
            if name in found:
                raise self.damaged(f"{shown(name)} is there twice")
            found[name] = item
        return found

    def placed(
        self, tensors: Mapping[str, GgufTensor], metadata: Mapping[str, Any]
    ) -> Mapping[str, GgufTensor]:
        """The tensors with their places in the file, which are whole, apart and aligned."""
        step = metadata.get("general.alignment", _ALIGNMENT)
        if type(step) is not int or step < 1 or step & step - 1:
            raise self.damaged(f"general.alignment is {shown(step)}, and no power of 2")
        start = -(-self.data.tell() // step) * step
        if odd := [name for name, tensor in tensors.items() if tensor.start % step]:
            raise self.damaged(f"{shown(odd[0])} does not start at a multiple of {step}")
        placed = {n: GgufTensor(t.type, t.shape, start + t.start) for n, t in tensors.items()}
        ordered = sorted(placed, key=lambda name: placed[name].start)
        for name, behind in pairwise(ordered):
            if placed[name].end > placed[behind].start:
                raise self.damaged(f"{shown(name)} and {shown(behind)} overlap")
        if ordered and placed[ordered[-1]].end > len(self.data):
            raise self.damaged(f"{shown(ordered[-1])} is cut off by its end, at {len(self.data)}")
        return placed
