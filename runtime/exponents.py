"""Cast 16-bit floats by adding to their exponents: times a power of two, most change in nothing else."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.dtypes import Array

_SIGN = np.uint16(1 << 15)
_MAGNITUDE = np.uint16(_SIGN - 1)
_PAYS = 1 << 12  # magnitudes; of fewer, most values of a weight would be among the others


@dataclass(frozen=True)
class ExponentShift:
    """The bits of a float times 2 ** left plus `add`, and its sign, are those of its cast.

    That holds for magnitudes from `least` on, `count` in all; the others need a table.
    """

    left: int  # digits by which the new mantissa is longer
    add: int
    least: int  # bits of a magnitude
    count: int

    def others(self, bits: Array, scratch: Array, mask: Array) -> npt.NDArray[np.bool_]:
        """Return which floats, given by their bits, need a table: `mask`, in the same shape.

        `scratch` is memory like `bits`; `mask` is of bool.
        """
        np.bitwise_and(bits, _MAGNITUDE, out=scratch)
        np.subtract(scratch, np.uint16(self.least), out=scratch)
        return np.greater_equal(scratch, np.uint16(self.count), out=mask)

    def cast(self, bits: Array, scratch: Array, out: Array) -> None:
        """Write the new bits to `out`, which are wrong for the others."""
        if not self.left:
            np.add(bits, np.uint16(self.add), out=out)
            return
        np.left_shift(bits, np.uint16(self.left), out=out)
        np.add(out, np.uint16(self.add), out=out)
        np.bitwise_and(out, _MAGNITUDE, out=out)
        np.bitwise_and(bits, _SIGN, out=scratch)
        np.bitwise_or(out, scratch, out=out)


def exponent_shift(stored: Array, exact: Array, left: int) -> ExponentShift | None:
    """Return the shift that makes what a table has, or None where it has not enough of one.

    Args:
        stored: uint16 [32768], what the positive floats become, in the order of their bits.
        exact: bool [32768], where the cast is without an error.
        left: digits by which the new mantissa is longer.
    """
    if left < 0:
        return None
    magnitudes = np.arange(_SIGN, dtype=np.uint16) << np.uint16(left)
    added = stored - magnitudes
    if left:
        added &= _MAGNITUDE
    add = int(np.bincount(added[exact], minlength=1).argmax())
    taken = np.flatnonzero(exact & (added == add))
    run = max(np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1), key=len)
    if len(run) < _PAYS:
        return None
    return ExponentShift(left, add, int(run[0]), len(run))
