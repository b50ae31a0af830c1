"""Multiply 16-bit floats by a power of two: integer addition to their exponents."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.memory.dtypes import Array

_MAGNITUDE = np.uint16((1 << 15) - 1)  # the sign off
_FEW = 1 / 16  # of the values; looking up more one by one takes longer than all at once
_PAYS = 1 << 13  # magnitudes; where the sum is right for fewer, most values are among the others


@dataclass(frozen=True)
class ExponentShift:
    """For magnitudes from `least` on, `count` in all, the bits plus `add` are those of the product.

    The others (subnormal numbers, those beyond the range, NaN) need a table.
    """

    add: int  # modulo 2 ** 16, and so of the sign too
    least: int  # bits of a float, the sign off
    count: int

    def others(self, bits: Array, scratch: Array) -> npt.NDArray[np.intp] | None:
        """Return where the others are, counted row by row; None if they are not few.

        `scratch` is memory like `bits`, in one piece.
        """
        np.bitwise_and(bits, _MAGNITUDE, out=scratch)
        np.subtract(scratch, np.uint16(self.least), out=scratch)
        are = scratch >= np.uint16(self.count)
        return np.flatnonzero(are) if np.count_nonzero(are) <= bits.size * _FEW else None


def exponent_shift(products: Array, exact: Array) -> ExponentShift | None:
    """Return the shift that gives the same as a table; None where there is none.

    Args:
        products: uint16 [32768], of the positive floats in the order of their bits.
        exact: bool [32768], where they were not rounded.
    """
    added = products - np.arange(len(products), dtype=np.uint16)
    add = int(np.bincount(added[exact], minlength=1).argmax())
    taken = np.flatnonzero(exact & (added == add))
    run = max(np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1), key=len)
    return ExponentShift(add, int(run[0]), len(run)) if len(run) >= _PAYS else None
