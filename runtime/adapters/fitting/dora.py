"""DoRA's magnitudes as scales: d = m / |W + s B A|, a norm for each output of a site.

PEFT's definition (https://arxiv.org/abs/2402.09353): y = (x W + x A B) d + the base model's own
bias. W is the engine's own, or that of a checkpoint; without one the adapter is refused.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.contract.sites import MAGNITUDE, BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import Pair, Weight
from trt_lora.runtime.files.stored_matrix import Block
from trt_lora.runtime.files.untrusted_file import ReadBuffer
from trt_lora.runtime.memory.dtypes import Array

Base = Callable[[str], Iterable[Block]]  # path of a linear -> its W [k, n], block by block


def with_scales(adapter: Adapter, base: Base, paths: Container[str]) -> Adapter:
    """Return the adapter with a scale in the place of magnitudes; it is read when it is cast.

    Args:
        adapter: any; one without magnitudes is returned as it is.
        base: the weights that it was trained on.
        paths: of the modules whose magnitudes are meant; others stay.

    Raises:
        AdapterError: a magnitude has no A and B beside it; or, when a scale is read, a magnitude is
            not above 0, or not as wide as the base weight.
    """
    names, weights = BindingNames.LORA, dict(adapter.weights)
    for (kind, path), magnitude in adapter.vectors.items():
        if kind != MAGNITUDE or path not in paths:
            continue
        pair = [weights.get(name) for name in names.pair(path)]
        if pair[0] is None or pair[1] is None:
            raise AdapterError(f"{adapter.source}: {path} has DoRA's magnitude without A and B")
        del weights[names.binding(MAGNITUDE, path)]
        scale = _scale(magnitude, (pair[0], pair[1]), path, base, adapter.source)
        weights[names.binding("scale", path)] = scale
    return replace(adapter, weights=weights)


def _scale(magnitude: Weight, pair: Pair, path: str, base: Base, source: str) -> Weight:
    def read(buffer: ReadBuffer | None = None) -> Array:
        values = magnitude.read(None).astype(np.float64)
        label = f"{source}: {', '.join(magnitude.names)}"
        if (values <= 0).any():
            raise AdapterError(f"{label} holds {values.min():.4g}; a magnitude is above 0")
        with np.errstate(all="ignore"):  # what is not finite is refused by its name
            return (values / _norms(pair, base(path))).astype(np.float32)

    return Weight(magnitude.names, magnitude.shape, "float32", read)


def _norms(pair: Pair, blocks: Iterable[Block]) -> npt.NDArray[np.float64]:
    """|W + A B| [n] of every column, in float64; the scale is in B."""
    a, b = (weight.read(None).astype(np.float64) * weight.scale for weight in pair)
    squares = np.zeros(b.shape[1])
    for rows, columns, values in blocks:
        sums = values.astype(np.float64) + a[rows] @ b[:, columns]
        squares[columns] += np.square(sums, out=sums).sum(axis=0)
    return np.sqrt(squares)
