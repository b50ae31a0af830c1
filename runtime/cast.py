"""Write a weight where an engine reads it: transposed, scaled in float32, cast, and checked.

All in one pass over tiles that stay in the processor's cache: a plain transposed copy of a large
matrix takes several times as long.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.float_bits import is_finite, power_of_two, times_power_of_two
from trt_lora.runtime.tensors import Array, narrow, widen
from trt_lora.runtime.weight import Float32, Weight

_TILE = 1 << 16  # elements; with the scratch memory, a tile fits a processor's second cache
_SIDE = 128  # the least rows and columns of a tile, where the matrix has as many
_WIDEST = 4  # bytes of an element
_GAP = 16  # elements between the rows of a tile


@dataclass(frozen=True)
class Conversion:
    """What a cast changed."""

    rounding_error: float = 0.0  # the largest absolute difference of a value
    flushed: int = 0  # values other than zero that became zero

    def __or__(self, other: "Conversion") -> "Conversion":
        """Return what both changed together."""
        error = max(self.rounding_error, other.rounding_error)
        return Conversion(error, self.flushed + other.flushed)

    @classmethod
    def of_all(cls, conversions: Iterable["Conversion"]) -> "Conversion":
        """Return what several changed together."""
        return reduce(or_, conversions, cls())


class Caster:
    """Casts weights one after another, in scratch memory that it keeps.

    Fresh memory for every step would cost more than the arithmetic.
    """

    def __init__(self) -> None:
        elements = _TILE + _TILE * _GAP // _SIDE  # rows with a gap have at least _SIDE
        self._memory = tuple(np.empty(elements * _WIDEST, np.uint8) for _ in range(2))

    def write(self, weight: Weight, dtype: str, out: Array, what: str) -> Conversion:
        """Write the values of a weight, in `dtype`, to `out`, which has the weight's shape.

        Args:
            weight: the source, a matrix.
            dtype: float32, float16 or bfloat16.
            out: storage of `dtype`, in any memory order.
            what: how messages call the weight.

        Raises:
            AdapterError: a value is NaN or infinite, or leaves the range of `dtype`.
        """
        source = weight.read()
        if source.flags.f_contiguous:  # go through the source in the order of its memory
            source, out = source.T, out.T
        if weight.dtype == dtype and weight.scale == 1:
            conversion = self._copy(source, dtype, out)
        elif weight.dtype == dtype != "float32" and power_of_two(weight.scale) is not None:
            conversion = self._shift(source, weight, out)
        else:
            conversion = _round(source, weight, dtype, out)
        if conversion is None:
            raise AdapterError(_not_finite(source, weight, dtype, what))
        return conversion

    def _copy(self, source: Array, dtype: str, out: Array) -> Conversion | None:
        for tile in _tiles(source.shape):
            copy, scratch = self._scratch(source[tile])
            np.copyto(copy, source[tile])
            if not is_finite(copy, dtype, scratch):
                return None
            out[tile] = copy
        return Conversion()

    def _shift(self, source: Array, weight: Weight, out: Array) -> Conversion | None:
        """Times a power of two, several times faster than by way of float32."""
        exponent = power_of_two(weight.scale) or 0
        places = []
        for tile in _tiles(source.shape):
            stored, scratch = self._scratch(source[tile])
            others = times_power_of_two(source[tile], exponent, weight.dtype, stored, scratch)
            out[tile] = stored
            if others.size:
                rows, columns = np.divmod(others, stored.shape[1])
                places.append((rows + tile[0].start, columns + tile[1].start))
        if not places:
            return Conversion()
        index = tuple(np.concatenate(parts) for parts in zip(*places, strict=True))
        rest = _scaled(source[index], weight)
        out[index] = stored = narrow(rest, weight.dtype)
        if not is_finite(stored, weight.dtype):
            return None
        return Conversion() if exponent >= 0 else _compare(rest, stored, weight.dtype)

    def _scratch(self, like: Array) -> list[Array]:
        """Both pieces of memory in the shape and dtype of a tile.

        Wide rows are set apart: starting a power of two apart, they would share the same few cache
        lines, and a transposed copy would take twice as long.
        """
        rows, columns = like.shape
        width = columns + (_GAP if columns >= _SIDE else 0)
        size = rows * width * like.itemsize
        spaced = (memory[:size].view(like.dtype).reshape(rows, width) for memory in self._memory)
        return [memory[:, :columns] for memory in spaced]


def _tiles(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    if 0 in shape:
        return
    rows, columns = (min(size, _SIDE) for size in shape)
    columns = min(shape[1], max(columns, _TILE // rows))
    rows = min(shape[0], max(rows, _TILE // columns))
    for row in range(0, shape[0], rows):
        for column in range(0, shape[1], columns):
            yield slice(row, row + rows), slice(column, column + columns)


def _round(source: Array, weight: Weight, dtype: str, out: Array) -> Conversion | None:
    """Cast by way of float32, and compare the result with it."""
    conversion = Conversion()
    for tile in _tiles(source.shape):
        exact = _scaled(source[tile], weight)
        out[tile] = stored = narrow(exact, dtype)
        if not is_finite(stored, dtype):
            return None
        if dtype != "float32":
            conversion |= _compare(exact, stored, dtype)
    return conversion


def _scaled(values: Array, weight: Weight) -> Float32:
    wide = widen(values, weight.dtype).astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return wide if weight.scale == 1 else wide * np.float32(weight.scale)


def _compare(exact: Float32, stored: Array, dtype: str) -> Conversion:
    found = widen(stored, dtype).astype(np.float32, copy=False)
    error = float(np.abs(exact - found).max(initial=0))
    return Conversion(error, int(np.count_nonzero(exact) - np.count_nonzero(found)))


def _not_finite(source: Array, weight: Weight, dtype: str, what: str) -> str:
    """Tell a damaged source from a range that is too small."""
    largest = 0.0
    for tile in _tiles(source.shape):
        values = np.abs(widen(source[tile], weight.dtype).astype(np.float32))
        largest = float(np.maximum(largest, values.max()))  # NaN stays
    if not math.isfinite(largest):
        why = "the training diverged, the file is damaged, or a scale is too large"
        return f"{what} holds NaN or infinity: {why}"
    scale = "" if weight.scale == 1 else f" after its scale of {weight.scale:.4g}"
    hint = "" if dtype == "float32" else "; build the engine with --dtype bfloat16 or float32"
    value = f"{largest * abs(weight.scale):.4g}"
    return f"{what} has a value of {value}{scale}, beyond the range of {dtype}{hint}"
