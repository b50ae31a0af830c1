"""Descriptions of tensors in the bindings of TensorRT, as a plugin's callbacks are given."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

# Of LoraAdd2: x, A and B of two sites, two addends.
SHAPES = [(2, 3, 8), (8, 4), (4, 16), (8, 1), (1, 6), (2, 3, 16), (2, 3, 6)]


def changed(index: int, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return `SHAPES` with one exchanged."""
    return [*SHAPES[:index], shape, *SHAPES[index + 1 :]]


def described(trt: Any, shapes: Sequence[Sequence[int]], dtype: str = "HALF") -> list[Any]:
    """What TensorRT says of tensors."""
    descriptions = [trt.PluginTensorDesc() for _ in shapes]
    for description, shape in zip(descriptions, shapes, strict=True):
        description.dims = trt.Dims(tuple(shape))
        description.type = getattr(trt.DataType, dtype)
        description.format = trt.TensorFormat.LINEAR
    return descriptions


def ranges(trt: Any, low: Sequence[Sequence[int]], high: Sequence[Sequence[int]]) -> list[Any]:
    """What TensorRT says of tensors whose shapes are not known yet."""
    pairs = zip(described(trt, low), low, high, strict=True)
    return [SimpleNamespace(desc=desc, min=tuple(a), max=tuple(b)) for desc, a, b in pairs]
