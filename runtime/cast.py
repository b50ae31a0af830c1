"""Write a weight where an engine reads it: transposed, scaled in float32, cast, and checked.

All in one pass over tiles that stay in the processor's cache: a plain transposed copy of a large
matrix takes four times as long.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.tensors import Array, narrow, storage_dtype, widen
from trt_lora.runtime.weight import Weight

_TILE = 1 << 15  # elements
_SIDE = 128

# Sign bit off, a finite element is below these bits.
_INFINITY = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
_DIGITS = {"float16": 10, "bfloat16": 7}  # of the mantissa
_MAGNITUDE = {"float32": 0x7FFF_FFFF, "float16": 0x7FFF, "bfloat16": 0x7FFF}


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


def write_weight(weight: Weight, dtype: str, out: Array, what: str) -> Conversion:
    """Write the values of a weight, in `dtype`, to `out`, which has the weight's shape.

    Args:
        weight: the source.
        dtype: float32, float16 or bfloat16.
        out: storage of `dtype`, in any memory order.
        what: how messages call the weight.

    Raises:
        AdapterError: a value is NaN or infinite, or leaves the range of `dtype`.
    """
    source = weight.read()
    if source.flags.f_contiguous:  # go through the source in the order of its memory
        source, out = source.T, out.T
    conversion = Conversion()
    for tile in _tiles(source.shape):
        converted = _convert(source[tile], weight, dtype)
        if converted is None:
            raise AdapterError(_not_finite(weight, dtype, what))
        out[tile] = converted[0]
        conversion |= converted[1]
    return conversion


def _tiles(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    rows, columns = (min(size, _SIDE) for size in shape)
    columns = min(shape[1], max(columns, _TILE // max(rows, 1)))
    rows = min(shape[0], max(rows, _TILE // max(columns, 1)))
    for row in range(0, shape[0], max(rows, 1)):
        for column in range(0, shape[1], max(columns, 1)):
            yield slice(row, row + rows), slice(column, column + columns)


def _convert(values: Array, weight: Weight, dtype: str) -> tuple[Array, Conversion] | None:
    """The values in storage of `dtype`, dense; None if one is not finite there."""
    if weight.dtype == dtype and weight.scale == 1:
        # Dense: many rows a power of two apart would share the same few cache lines.
        return (values.copy(), Conversion()) if is_finite(values, dtype) else None
    if weight.dtype == dtype and dtype != "float32" and _exponent(weight.scale) is not None:
        return _shifted(values, weight, dtype)
    return _rounded(values, weight, dtype)


def _rounded(values: Array, weight: Weight, dtype: str) -> tuple[Array, Conversion] | None:
    exact = widen(values, weight.dtype).astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = exact if weight.scale == 1 else exact * np.float32(weight.scale)
    stored = narrow(exact, dtype)
    if not is_finite(stored, dtype):
        return None
    if dtype == "float32":
        return stored, Conversion()
    found = widen(stored, dtype).astype(np.float32, copy=False)
    error = float(np.abs(exact - found).max(initial=0))
    return stored, Conversion(error, int(np.count_nonzero(exact) - np.count_nonzero(found)))


def _exponent(scale: float) -> int | None:
    """The n of a scale of 2 ** n, -15 <= n <= 15; None for another."""
    fraction, exponent = math.frexp(scale)
    return exponent - 1 if fraction == 0.5 and abs(exponent - 1) <= 15 else None


def _shifted(values: Array, weight: Weight, dtype: str) -> tuple[Array, Conversion] | None:
    """Multiply 16-bit floats by a power of two: add it to their exponents, six times faster.

    Numbers that are subnormal before or after, or too large, are computed as all others are.
    """
    shift = (_exponent(weight.scale) or 0) * (1 << _DIGITS[dtype])
    lowest, largest = 1 << _DIGITS[dtype], _INFINITY[dtype] - 1  # the bits of normal numbers
    low, high = max(lowest, lowest - shift), min(largest, largest - shift)
    bits = values.view(np.int16)
    stored = bits + np.int16(shift)
    above = bits & np.int16(_MAGNITUDE[dtype])
    above -= np.int16(low)
    others = above.view(np.uint16) > high - low
    if not others.any():
        return stored.view(values.dtype), Conversion()
    places = np.flatnonzero(others)
    rounded = _rounded(values.reshape(-1)[places], weight, dtype)
    if rounded is None:
        return None
    stored.reshape(-1)[places] = rounded[0].view(np.int16)
    return stored.view(values.dtype), rounded[1]


def is_finite(stored: Array, dtype: str) -> bool:
    """Return whether no element of `stored`, storage of `dtype`, is NaN or infinite."""
    bits = stored.view(np.dtype(f"u{storage_dtype(dtype).itemsize}"))
    largest = (bits & bits.dtype.type(_MAGNITUDE[dtype])).max(initial=0)
    return bool(largest < _INFINITY[dtype])


def _not_finite(weight: Weight, dtype: str, what: str) -> str:
    """Tell a damaged source from a range that is too small."""
    source = widen(weight.read(), weight.dtype)
    if not np.isfinite(source).all():
        return f"{what} holds NaN or infinity: the training diverged or the file is damaged"
    largest = float(np.abs(source.astype(np.float64)).max()) * abs(weight.scale)
    scale = "" if weight.scale == 1 else f" after its scale of {weight.scale:.4g}"
    hint = "" if dtype == "float32" else "; build the engine with --dtype bfloat16 or float32"
    return f"{what} has a value of {largest:.4g}{scale}, beyond the range of {dtype}{hint}"
