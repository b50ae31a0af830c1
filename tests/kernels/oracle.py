"""The LoRA operator in float64, and how far from it rounding may take a kernel.

With u = 2^-24, half the spacing of float32, and p the bits of the dtype's significand:

    |out - exact| <= 2^-p |exact| + spacing / 2                       the result is rounded once
                     + (4 sqrt(k + rank) + 32) u (|y| + |x| |A| |B|)  sums are float32
                     + (2^-2p |t| + 2^-39 max |t|) |B|                t on tensor cores

Sums. Each addition is off by at most u of the sum so far, which is at most the sum of magnitudes. A
term goes through fewer than k + rank additions in a thread, whose errors have either sign: all of
them together exceed 4 sqrt(k + rank) u with a probability below 2 e^-8 (Hoeffding), and in fact far
below it, for a sum so far is mostly much smaller than the sum of magnitudes. At most 32 more join
lanes (5), warps (7), CTAs (7), splits (7) and y (1): too few to cancel, so each counts whole.

Tensor cores take t as two numbers of p bits. The first is off by 2^-p of t, and the second by 2^-p
of that. Float16 has no numbers below 2^-24: a row is scaled so that its largest t lies in
[2^14, 2^15), and half that spacing is 2^-39 of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.kernels.group_call import GroupShape
from trt_lora.runtime.memory.dtypes import Array

Float64 = npt.NDArray[np.float64]

_U = 2.0**-24
_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}  # p
_SPACING = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}  # of the smallest


@dataclass(frozen=True)
class Inputs:
    """As stored: x [m, k]; for each site A [k, rank], B [rank, n] and perhaps y [m, n].

    With stacks A is [slots, k, rank], B [slots, rank, n]; see `kernels.slot_calls`.
    """

    x: Array
    a: tuple[Array, ...]
    b: tuple[Array, ...]
    y: tuple[Array, ...] = ()
    rows: tuple[Array, ...] = ()  # with stacks: slot [m], rank [slots, sites of the engine]


def exact_outputs(inputs: Inputs) -> list[Float64]:
    """Return (y +) (x @ A) @ B of each site [m, n]."""
    x = wide(inputs.x)
    with np.errstate(invalid="ignore"):
        deltas = [(x @ wide(a)) @ wide(b) for a, b in zip(inputs.a, inputs.b, strict=True)]
        if not inputs.y:
            return deltas
        return [wide(y) + delta for y, delta in zip(inputs.y, deltas, strict=True)]


def error_bounds(shape: GroupShape, inputs: Inputs) -> list[Float64]:
    """Return the largest permitted error of each element of each site's output [m, n]."""
    ys: Sequence[Array | float] = inputs.y or [0.0] * len(shape.sites)
    sites = zip(inputs.a, inputs.b, ys, exact_outputs(inputs), strict=True)
    with np.errstate(invalid="ignore"):
        return [_error_bound(shape, inputs.x, *site) for site in sites]


def worst_error(shape: GroupShape, inputs: Inputs, outputs: Sequence[Array]) -> float:
    """Return the largest error of an element as a part of what is permitted; infinite for a NaN."""
    ratios = [
        np.abs(wide(out) - exact) / bound
        for out, exact, bound in zip(
            outputs, exact_outputs(inputs), error_bounds(shape, inputs), strict=True
        )
    ]
    worst = max(float(np.max(ratio)) for ratio in ratios)
    return float("inf") if np.isnan(worst) else worst


def wide(array: Array) -> Float64:
    """Return the values in float64."""
    return array.astype(np.float64)


def _error_bound(
    shape: GroupShape, x: Array, a: Array, b: Array, y: Array | float, exact: Float64
) -> Float64:
    t, magnitudes = np.abs(wide(x) @ wide(a)), np.abs(wide(x)) @ np.abs(wide(a))
    once = 2.0 ** -_BITS[shape.dtype] * np.abs(exact) + _SPACING[shape.dtype] / 2
    sums = (4 * np.sqrt(shape.k + len(b)) + 32) * _U
    bound: Float64 = once + sums * (
        np.abs(np.asarray(y, np.float64)) + magnitudes @ np.abs(wide(b))
    )
    if shape.dtype != "float32":  # which no tensor core multiplies
        split = 2.0 ** (-2 * _BITS[shape.dtype]) * t + 2.0**-39 * t.max(axis=1, keepdims=True)
        bound += split @ np.abs(wide(b))
    return bound
