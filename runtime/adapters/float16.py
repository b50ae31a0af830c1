"""Fast rounding of whole arrays to float16; numpy rounds element by element."""

import numpy as np
import numpy.typing as npt

from trt_lora.runtime.memory.dtypes import Array, Float32

_SIGN = np.uint16(1 << 15)
_EXPONENT = np.uint16(0xFF << 7)  # in the upper half of a float32, as in all below
_LEAST = np.uint16(127 - 14 << 7)  # the exponent of float16's least normal number
# Times 1.5 * 2 ** 13: float32 has 13 digits more, and neither sign may leave the power of two.
_SHIFT = np.uint16((13 << 7) + (1 << 6))


class Float16Rounder:
    """Rounds to nearest, ties to even, subnormal numbers included.

    The adder does it: with d the power of two of x times 1.5 * 2 ** 13, x + d ends at the digit at
    which x ends in float16. Less d again, it is what float16 makes of x. No number on the way is
    subnormal unless x is, so that a processor that was told to flush them gives the same.
    """

    def __init__(self, scratch: npt.NDArray[np.int64]) -> None:
        """Use memory of as many elements as there are values at most."""
        size = len(scratch)
        self._wide = scratch.view(np.int32)[:size]
        self._sign, self._exponent = scratch.view(np.uint16)[2 * size :].reshape(2, size)

    def round(self, values: Float32, stored: Array, found: Float32) -> None:
        """Write `values` as float16 to `stored`, and what that is in float32 to `found`.

        Args:
            values: [n] in one piece, of magnitudes below 65520, where float16 ends.
            stored: float16 [n] in one piece.
            found: [n] in one piece.
        """
        wide, sign, exponent = (a[: values.size] for a in (self._wide, self._sign, self._exponent))
        bits = stored.view(np.int16)
        np.right_shift(values.view(np.int32), 16, out=wide)
        np.copyto(sign.view(np.int16), wide, casting="unsafe")
        np.bitwise_and(sign, _EXPONENT, out=exponent)
        np.bitwise_and(sign, _SIGN, out=sign)
        np.maximum(exponent, _LEAST, out=exponent)

        np.add(exponent, _SHIFT, out=bits.view(np.uint16))
        np.copyto(wide, bits)
        np.left_shift(wide, 16, out=wide)
        far = wide.view(np.float32)
        np.add(values, far, out=found)
        np.copyto(bits, found.view(np.int32), casting="unsafe")  # x in units of its last bit
        np.subtract(found, far, out=found)

        np.abs(bits, out=bits)
        np.subtract(exponent, _LEAST, out=exponent)
        np.left_shift(exponent, 3, out=exponent)  # where float16 has it
        np.add(bits, exponent.view(np.int16), out=bits)
        np.bitwise_or(bits, sign.view(np.int16), out=bits)
