"""Round float32 to float16 many values at a time: numpy does it one by one."""

import numpy as np

from trt_lora.runtime.dtypes import Array, Float32

_EXPONENT = 0xFF << 23  # of a float32
_LEAST = 127 - 14 << 23  # the exponent of float16's least normal number
# Times 1.5 * 2 ** 13: float32 has 13 digits more, and neither sign may leave the power of two.
_SHIFT = (13 << 23) + (1 << 22)


class Float16Rounder:
    """Rounds to nearest, ties to even, subnormal numbers included.

    The adder does it: with d the power of two of x times 1.5 * 2 ** 13, x + d ends at the digit at
    which x ends in float16. Less d again, it is what float16 makes of x. No number on the way is
    subnormal unless x is, so that a processor that was told to flush them gives the same.
    """

    def __init__(self, size: int) -> None:
        """Keep scratch memory for as many as `size` values."""
        self._least = np.full(size, _LEAST + _SHIFT, np.int32)
        self._far = np.empty(size, np.int32)
        self._high = np.empty(size, np.uint16)

    def round(self, values: Float32, stored: Array, found: Float32) -> None:
        """Write `values` as float16 to `stored`, and what that is in float32 to `found`.

        Args:
            values: [n] in one piece, of magnitudes below 65520, where float16 ends.
            stored: float16 [n] in one piece.
            found: [n] in one piece.
        """
        n = values.size
        far, high, bits = self._far[:n], self._high[:n], stored.view(np.int16)
        np.bitwise_and(values.view(np.int32), _EXPONENT, out=far)
        far += _SHIFT
        np.maximum(far, self._least[:n], out=far)
        np.add(values, far.view(np.float32), out=found)
        np.copyto(bits, found.view(np.int32), casting="unsafe")  # x in units of its last bit
        found -= far.view(np.float32)

        np.abs(bits, out=bits)
        far -= _LEAST + _SHIFT
        far >>= 13  # the exponent, where float16 has it
        np.copyto(high, far, casting="unsafe")
        np.add(bits, high.view(np.int16), out=bits)
        np.right_shift(values.view(np.int32), 16, out=far)
        np.copyto(high, far, casting="unsafe")
        high &= 0x8000  # the sign
        np.bitwise_or(bits, high.view(np.int16), out=bits)
