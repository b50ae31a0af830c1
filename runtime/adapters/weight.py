"""One LoRA factor, read lazily from its source and scaled during the cast."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from trt_lora.runtime.files.untrusted_file import ReadBuffer, Reader
from trt_lora.runtime.memory.dtypes import Array, Float32, storage_dtype
from trt_lora.runtime.memory.tensor import Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A [k, r] or B [r, n], or of experts A [E, k, r] or B [E, r, n].

    Its values are what `read` returns times `scale`.
    """

    names: tuple[str, ...]  # the tensors of the source that it is made of, for messages
    shape: tuple[int, ...]
    dtype: str
    read: Reader  # of that shape, in any memory order
    scale: float = 1.0
    folded: float = 1.0  # a scale that the values have already, for reports
    tensor: Tensor | None = None  # where the values already are, in their own dtype and unscaled
    in_file: tuple[int, ...] | None = None  # shape there, where it is the other way round

    def values(self, buffer: ReadBuffer | None = None) -> Float32:
        """Return the values, computed in float32."""
        values = self.read(buffer).astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            return values if self.scale == 1 else values * np.float32(self.scale)

    def times(self, factor: float) -> "Weight":
        """Return the weight with `factor` in its scale."""
        return replace(self, scale=self.scale * factor, tensor=None if factor != 1 else self.tensor)

    def transposed(self) -> "Weight":
        """Return the weight with its last two axes exchanged."""
        turned = self.in_file if self.is_convolution else None if self.in_file else self.shape
        *leading, rows, columns = self.shape

        def read(buffer: ReadBuffer | None = None) -> Array:
            return self.read(buffer).swapaxes(-1, -2)

        return replace(
            self, shape=(*leading, columns, rows), read=read, tensor=None, in_file=turned
        )

    @property
    def is_convolution(self) -> bool:
        """Whether it is [r, C, kh, kw] in its file."""
        return len(self.in_file or ()) > 3

    def flattened(self) -> "Weight":
        """Return [r, C, kh, kw] of a convolution as [r, C * kh * kw], in the order (channel, tap).

        Nothing else decides in which order A of a convolution lies. A matrix stays as it is.
        """
        if len(self.shape) == 2:
            return self
        shape = self.shape[0], math.prod(self.shape[1:])

        def read(buffer: ReadBuffer | None = None) -> Array:
            return self.read(buffer).reshape(shape)

        return replace(self, shape=shape, read=read, tensor=None, in_file=self.shape)

    def part(self, axis: int, start: int, stop: int) -> "Weight":
        """Return the slice `start:stop` of an axis."""
        index = (slice(None),) * axis + (slice(start, stop),)
        shape = tuple(stop - start if i == axis else size for i, size in enumerate(self.shape))

        def read(buffer: ReadBuffer | None = None) -> Array:
            return self.read(buffer)[index]

        return replace(self, shape=shape, read=read, tensor=None, in_file=None)


Pair = tuple[Weight, Weight]
"""A [k, r] and B [r, n] of one site; of experts A [E, k, r] and B [E, r, n]."""


def weight_of(name: str, tensor: Tensor) -> Weight:
    """Return a tensor in memory as a weight."""

    def read(buffer: ReadBuffer | None = None) -> Array:
        return tensor.read_storage()

    return Weight((name,), tensor.shape, tensor.dtype, read, tensor=tensor)


def zeros(shape: tuple[int, ...], dtype: str) -> Weight:
    """Return zeros."""
    return filled(shape, dtype, 0)


def filled(shape: tuple[int, ...], dtype: str, value: float) -> Weight:
    """Return one value everywhere."""
    return Weight((), shape, dtype, lambda buffer=None: np.full(shape, value, storage_dtype(dtype)))


def concatenate(weights: Sequence[Weight], axis: int) -> Weight:
    """Return weights one after another along an axis; the other sizes must agree."""
    if len(weights) == 1:
        return weights[0]
    axis %= len(weights[0].shape)
    ends = [*accumulate((weight.shape[axis] for weight in weights), initial=0)]
    places = [(slice(None),) * axis + (slice(*span),) for span in pairwise(ends)]
    shape = tuple(ends[-1] if i == axis else size for i, size in enumerate(weights[0].shape))
    return _assembled(weights, places, shape)


def padded(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """Return a weight with zeros behind it, up to `shape`."""
    if weight.shape == shape:
        return weight
    return _assembled([weight], [tuple(slice(size) for size in weight.shape)], shape)


def block_diagonal(blocks: Sequence[tuple[Weight, int]], columns: int) -> Weight:
    """Return [sum of rows, columns]: each weight below the last, from its own first column on.

    Of experts [E, sum of rows, columns].
    """
    places, row, leading = [], 0, blocks[0][0].shape[:-2]
    for weight, column in blocks:
        rows, width = weight.shape[-2:]
        place = slice(row, row + rows), slice(column, column + width)
        places.append((slice(None),) * len(leading) + place)
        row += rows
    return _assembled([weight for weight, _ in blocks], places, (*leading, row, columns))


def stacked(weights: Mapping[int, Weight], count: int) -> Weight:
    """Return matrices of one shape as [count, ...], each in its place; others are zeros."""
    places = [(slice(number, number + 1),) for number in weights]
    (shape,) = {weight.shape for weight in weights.values()}
    return _assembled([*weights.values()], places, (count, *shape))


def _assembled(
    weights: Sequence[Weight], places: Sequence[tuple[slice, ...]], shape: tuple[int, ...]
) -> Weight:
    """One weight of `shape`, zero but for the given weights at their places."""
    names = tuple(dict.fromkeys(name for weight in weights for name in weight.names))
    kinds = {(weight.dtype, weight.scale) for weight in weights}
    if len(kinds) == 1:  # nothing needs to be computed, and so nothing is rounded
        ((dtype, scale),) = kinds
        parts = [weight.read for weight in weights]
    else:
        dtype, scale = "float32", 1.0
        parts = [weight.values for weight in weights]

    def read(buffer: ReadBuffer | None = None) -> Array:
        out = np.zeros(shape, storage_dtype(dtype))
        for place, part in zip(places, parts, strict=True):
            out[place] = part(buffer)
        return out

    return Weight(names, shape, dtype, read, scale)
