"""Cast a weight into the engine's dtype: transpose, scale in float32, round and check.

All in one pass over tiles that stay in the processor's cache: a plain transposed copy of a large
matrix takes several times as long.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.cast_table import CastTable, cast_table
from trt_lora.runtime.adapters.float16 import Float16Rounder
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array, Float32, is_finite

_TILE = 1 << 16  # elements; with half as many, twice the calls of numpy take longer altogether
_SIDE = 128  # the least rows and columns of a tile, where the matrix has as many
_GAP = 16  # elements between the rows of a tile
_TABLE_PAYS = 1 << 19  # values; making a table takes as long as casting so many without it


@dataclass(frozen=True)
class Conversion:
    """Rounding error and flushed values of a cast."""

    rounding_error: float = 0.0  # the largest absolute difference of a value
    flushed: int = 0  # values other than zero that became zero

    @classmethod
    def of_all(cls, conversions: Iterable["Conversion"]) -> "Conversion":
        """Return the combined changes of several casts."""
        every = [*conversions]
        error = max((each.rounding_error for each in every), default=0.0)
        return cls(error, sum(each.flushed for each in every))


class Caster:
    """Casts weights one after another, in scratch memory that it keeps.

    Fresh memory for every step would cost more than the arithmetic.
    """

    def __init__(self) -> None:
        self._buffer = ReadBuffer()
        self._index = np.empty(_TILE, np.int64)
        self._float16 = Float16Rounder(self._index)  # which is used at other times
        self._exact, self._found = (np.empty(_TILE, np.float32) for _ in range(2))
        self._stored = np.empty(_TILE, np.uint16)
        self._apart = np.empty(_TILE + _TILE * _GAP // _SIDE, np.float32)
        self._tables: dict[tuple[str, str, float], CastTable] = {}
        self._values: Counter[tuple[str, str, float]] = Counter()

    def write(self, weight: Weight, dtype: str, out: Array, label: str) -> Conversion:
        """Write the values of a weight, in `dtype`, to `out`, which has the weight's shape.

        Args:
            weight: the source, a matrix, a vector or the matrices of experts.
            dtype: float32, float16 or bfloat16.
            out: storage of `dtype`, in any memory order.
            label: how messages call the weight.

        Raises:
            AdapterError: a value is NaN or infinite, or leaves the range of `dtype`.
        """
        source = weight.read(self._buffer)
        if source.ndim == 3:  # of experts
            parts = enumerate(zip(source, out, strict=True))
            return Conversion.of_all(
                self._write(weight, one, dtype, to, f"{label}, expert {number}")
                for number, (one, to) in parts
            )
        return self._write(weight, source, dtype, out, label)

    def forget_scales(self) -> None:
        """Free the tables of the scales so far, which may not come again."""
        self._tables.clear()
        self._values.clear()

    def _write(
        self, weight: Weight, source: Array, dtype: str, out: Array, label: str
    ) -> Conversion:
        if source.ndim == 1:  # a vector
            source, out = source[None], out[None]
        if source.flags.f_contiguous:  # go through the source in the order of its memory
            source, out = source.T, out.T
        is_short = source.itemsize == out.itemsize == 2
        if is_short and weight.dtype == dtype and weight.scale == 1:
            conversion = self._copy(source, out)
        elif is_short and (table := self._table(weight, dtype)):
            conversion = self._look_up(source, table, out)
        else:
            conversion = self._round(source, weight.scale, out)
        if conversion is None:
            raise AdapterError(_not_finite(source, weight, dtype, label))
        return conversion

    def _copy(self, source: Array, out: Array) -> Conversion | None:
        for tile in _tiles(source.shape):
            copy = self._set_apart(source[tile], out.dtype)
            if not is_finite(copy, self._stored[: copy.size].reshape(copy.shape)):
                return None
            np.copyto(out[tile], copy)
        return Conversion()

    def _table(self, weight: Weight, dtype: str) -> CastTable | None:
        """The table of this cast, once it pays."""
        key = weight.dtype, dtype, weight.scale
        self._values[key] += math.prod(weight.shape)
        if key not in self._tables and self._values[key] >= _TABLE_PAYS:
            self._tables[key] = cast_table(*key)
        return self._tables.get(key)

    def _look_up(self, source: Array, table: CastTable, out: Array) -> Conversion | None:
        rank = lost = 0
        for tile in _tiles(source.shape):
            bits = source[tile].view(np.uint16)
            entries = self._found[: bits.size].view(np.uint32)
            index = self._index[: bits.size]
            np.copyto(index.reshape(bits.shape), bits)
            np.take(table.entries, index, out=entries, mode="wrap")  # quicker than "raise"
            self._place(entries.reshape(bits.shape), out.view(np.uint16)[tile])
            rank, lost = table.add_changes(entries, rank, lost)
        error = float(table.errors[rank])
        return Conversion(error, lost) if math.isfinite(error) else None

    @np.errstate(over="ignore", invalid="ignore")
    def _round(self, source: Array, scale: float, out: Array) -> Conversion | None:
        """Cast by way of float32, and compare the result with it."""
        changes = []
        for tile in _tiles(source.shape):
            exact = self._scaled(source[tile], scale)
            if not np.isfinite(_largest(exact).astype(out.dtype)):
                return None
            found = self._found[: exact.size]
            stored = self._narrow(exact, found, out.dtype)
            self._place(stored.reshape(source[tile].shape), out[tile])
            if stored is not exact:
                changes.append(_compare(exact, found))
        return Conversion.of_all(changes)

    def _scaled(self, values: Array, scale: float) -> Float32:
        """Return the values times `scale`, as float32 [n]."""
        exact = self._exact[: values.size]
        placed = exact.reshape(values.shape)
        if values.dtype == np.float32:
            np.multiply(values, np.float32(scale), out=placed)
        else:
            np.copyto(placed, values)
            np.multiply(exact, np.float32(scale), out=exact)
        return exact

    def _narrow(self, exact: Float32, found: Float32, dtype: np.dtype[Any]) -> Array:
        """Return the values in `dtype`, and write what that is in float32 to `found`."""
        if dtype == np.float32:
            return exact
        stored = self._stored[: exact.size].view(dtype)
        if dtype == np.float16:
            self._float16.round(exact, stored, found)
        else:
            np.copyto(stored, exact, casting="unsafe")
            np.copyto(found, stored)
        return stored

    def _place(self, values: Array, out: Array) -> None:
        """Copy values to a tile of the result; of longer integers, the low bits."""
        if out.strides[1] != out.itemsize:  # transposed
            values = self._set_apart(values, out.dtype)
        np.copyto(out, values, casting="unsafe")

    def _set_apart(self, values: Array, dtype: np.dtype[Any]) -> Array:
        """Copy values to rows that lie apart; of longer integers, the low bits.

        Rows that start a power of two apart would share the same few cache lines, and a transposed
        copy of them would take several times as long.
        """
        rows, columns = values.shape
        width = columns + (_GAP if columns >= _SIDE else 0)
        apart = self._apart.view(dtype)[: rows * width].reshape(rows, width)[:, :columns]
        np.copyto(apart, values, casting="unsafe")
        return apart


def _tiles(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    if 0 in shape:
        return
    rows, columns = (min(size, _SIDE) for size in shape)
    columns = min(shape[1], max(columns, _TILE // rows))
    rows = min(shape[0], max(rows, _TILE // columns))
    for row in range(0, shape[0], rows):
        for column in range(0, shape[1], columns):
            yield slice(row, row + rows), slice(column, column + columns)


def _largest(values: Float32) -> np.float32:
    """The largest magnitude; NaN if a value is."""
    return np.float32(np.maximum(values.max(initial=0), -values.min(initial=0)))


def _compare(exact: Float32, found: Float32) -> Conversion:
    """Compare a cast with the exact values; overwrites `found`."""
    zeros = np.count_nonzero(found == 0)
    flushed = int(zeros - np.count_nonzero(exact == 0)) if zeros else 0
    return Conversion(float(_largest(np.subtract(found, exact, out=found))), flushed)


def _not_finite(source: Array, weight: Weight, dtype: str, label: str) -> str:
    """Tell a damaged source from a range that is too small."""
    largest = 0.0
    for tile in _tiles(source.shape):
        values = np.abs(source[tile].astype(np.float32))
        largest = float(np.maximum(largest, values.max()))  # NaN stays
    if not math.isfinite(largest):
        why = "the training diverged, the file is damaged, or a scale is too large"
        return f"{label} holds NaN or infinity: {why}"
    scale = "" if weight.scale == 1 else f" after its scale of {weight.scale:.4g}"
    wider = "; build the engine, or convert, with --dtype bfloat16 or float32"
    hint = "" if dtype == "float32" else wider
    value = f"{largest * abs(weight.scale):.4g}"
    return f"{label} has a value of {value}{scale}, beyond the range of {dtype}{hint}"
