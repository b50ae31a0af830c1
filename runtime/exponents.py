"""Cast 16-bit floats by adding to their exponents: times a power of two, most change in nothing else."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.dtypes import Array

_SIGN = 1 << 15
_MAGNITUDE = _SIGN - 1
_FEW = 1 / 16  # of the values; treating more one by one takes longer than a table for all
_PAYS = 1 << 11  # magnitudes; of fewer, most values of a weight would be among the others


@dataclass(frozen=True)
class ExponentShift:
    """The bits of a float times 2 ** left plus `add`, and its sign, are those of its cast.

    That holds for magnitudes from `least` on, `count` in all; the others need a table.
    """

    left: int  # digits by which the new mantissa is longer
    add: int
    least: int  # bits of a magnitude
    count: int

    def cast(self, bits: Array, above: Array, out: Array) -> None:
        """Write the new bits to `out`, wrong ones for the others.

        `above` is what `outside` left of the same bits; it is overwritten.
        """
        if not self.left:
            np.add(bits, np.uint16(self.add), out=out)
            return
        np.left_shift(above, np.uint16(self.left), out=above)
        first = (self.least << self.left) + self.add
        np.add(above, np.uint16(first % _SIGN), out=above)
        np.bitwise_and(bits, np.uint16(_SIGN), out=out)
        np.bitwise_or(out, above, out=out)


def outside(bits: Array, least: int, count: int, above: Array) -> npt.NDArray[np.intp] | None:
    """Return where floats are that do not have one of `count` magnitudes from `least` on.

    Args:
        bits: uint16 of any shape.
        least: bits of a magnitude.
        count: of magnitudes.
        above: memory like `bits`, in one piece; is left with the magnitudes less `least`.

    Returns:
        Places in the order of rows, or None if they are too many to be treated one by one.
    """
    np.bitwise_and(bits, np.uint16(_MAGNITUDE), out=above)
    np.subtract(above, np.uint16(least), out=above)
    are = above >= np.uint16(count)
    return np.flatnonzero(are) if np.count_nonzero(are) <= bits.size * _FEW else None


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
    if left:  # the sign is kept apart from the rest
        added, exact = added & np.uint16(_MAGNITUDE), exact & (stored < _SIGN)
    add = int(np.bincount(added[exact], minlength=1).argmax())
    taken = np.flatnonzero(exact & (added == add))
    run = max(np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1), key=len)
    if len(run) < _PAYS:
        return None
    return ExponentShift(left, add, int(run[0]), len(run))
