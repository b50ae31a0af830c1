"""Calls of the operator with random values, numpy's answer, and how far a kernel may be from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from emulation.emulator import Array, Arrays

from trt_lora.plugins.group import GroupShape, SiteShape

Float64 = npt.NDArray[np.float64]

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of a normal result
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}  # spacing below them
SUM = 2.0**-24  # of each float32 operation
SPLIT = {"float32": 0.0, "float16": 2.0**-21, "bfloat16": 2.0**-15}  # of t as two 16-bit numbers


@dataclass(frozen=True)
class Call:
    """Shapes, inputs, and float64 results."""

    shape: GroupShape
    arrays: Arrays

    def expected(self) -> list[Float64]:
        """(y +) (x @ A) @ B of each site, of the rounded inputs."""
        x = wide(self.arrays.x)
        pairs = zip(self.arrays.a, self.arrays.b, strict=True)
        with np.errstate(invalid="ignore"):
            deltas = [(x @ wide(a)) @ wide(b) for a, b in pairs]
            if not self.shape.adds:
                return deltas
            return [wide(y) + delta for y, delta in zip(self.arrays.y, deltas, strict=True)]

    def bounds(self) -> list[Float64]:
        """The largest permitted error of each element.

        |out - exact| <= rounding |exact| + spacing / 2
                         + ((k + rank + 64) 2^-24 + split) (|x| @ |A|) @ |B|

        The first line is one rounding of the result. The second is the float32 sums, of k and then
        rank terms and those of lanes, warps, CTAs and splits; and t as a high and a low 16-bit part
        on tensor cores, whose rest is 2^-2p of t for p bits each, doubled.
        """
        dtype, x = self.shape.dtype, np.abs(wide(self.arrays.x))
        found = []
        for site, a, b, exact in zip(
            self.shape.sites, self.arrays.a, self.arrays.b, self.expected(), strict=True
        ):
            sums = (self.shape.k + site.rank + 64) * SUM + SPLIT[dtype]
            with np.errstate(invalid="ignore"):
                terms = x @ np.abs(wide(a)) @ np.abs(wide(b))
            once = ROUNDING[dtype] * np.abs(exact) + SMALLEST[dtype] / 2
            found.append(once + 1.01 * sums * terms)
        return found

    def worst(self, outputs: Sequence[Array]) -> float:
        """The largest error as a part of what is permitted; infinite for a NaN."""
        ratios = [
            np.abs(wide(out) - exact) / bound
            for out, exact, bound in zip(outputs, self.expected(), self.bounds(), strict=True)
        ]
        worst = max(float(np.max(ratio)) for ratio in ratios)
        return float("inf") if np.isnan(worst) else worst


def make_call(
    m: int,
    k: int,
    sites: Sequence[tuple[int, int]],  # (n, rank) of each
    dtype: str,
    *,
    adds: bool = True,
    seed: int = 0,
) -> Call:
    """Return a call with normally distributed values."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape).astype(DTYPES[dtype])

    shape = GroupShape(m, k, tuple(SiteShape(n, rank) for n, rank in sites), dtype, adds)
    a = tuple(normal(k, rank) for _, rank in sites)
    b = tuple(normal(rank, n) for n, rank in sites)
    y = tuple(normal(m, n) for n, _ in sites) if adds else ()
    return Call(shape, Arrays(normal(m, k), a, b, y))


def wide(array: Array) -> Float64:
    """The values in float64."""
    return array.astype(np.float64)
