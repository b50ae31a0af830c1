"""Floats as their bits: numpy converts 16-bit floats one by one, integers many at a time."""

import math
from typing import Any

import numpy as np

from trt_lora.runtime.tensors import Array

# Sign bit off, the bits of finite floats grow with the float and are below these.
INFINITY = {"float32": 0x7F80_0000, "float16": 0x7C00, "bfloat16": 0x7F80}
MAGNITUDE = {"float32": 0x7FFF_FFFF, "float16": 0x7FFF, "bfloat16": 0x7FFF}
MANTISSA_DIGITS = {"float16": 10, "bfloat16": 7}
MAX_EXPONENT = 15

_UNSIGNED: dict[str, Any] = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def is_finite(stored: Array, dtype: str, scratch: Array | None = None) -> bool:
    """Return whether no element of `stored`, storage of `dtype`, is NaN or infinite.

    `scratch` is memory of the same shape and size of elements.
    """
    unsigned = _UNSIGNED[dtype]
    out = None if scratch is None else scratch.view(unsigned)
    magnitude = np.bitwise_and(stored.view(unsigned), unsigned(MAGNITUDE[dtype]), out=out)
    return bool(magnitude.max(initial=0) < INFINITY[dtype])


def power_of_two(scale: float) -> int | None:
    """Return the n of a scale of 2 ** n, -15 <= n <= 15; None for another."""
    fraction, exponent = math.frexp(scale)
    return exponent - 1 if fraction == 0.5 and abs(exponent - 1) <= MAX_EXPONENT else None


def times_power_of_two(
    values: Array, exponent: int, dtype: str, out: Array, scratch: Array
) -> Array:
    """Multiply 16-bit floats by 2 ** exponent: add it to their exponents.

    Args:
        values: storage of float16 or bfloat16.
        exponent: from `power_of_two`.
        dtype: of the values.
        out: where the products go; of the shape of `values`, 16 bits an element.
        scratch: memory like `out`.

    Returns:
        Which elements of `out`, by their flat index, are wrong: numbers that are subnormal before
        or after, too large, or not finite.
    """
    digits = MANTISSA_DIGITS[dtype]
    shift = exponent * (1 << digits)
    lowest, largest = 1 << digits, INFINITY[dtype] - 1  # the bits of normal numbers
    low, high = max(lowest, lowest - shift), min(largest, largest - shift)
    bits, above = values.view(np.int16), scratch.view(np.int16)
    np.add(bits, np.int16(shift), out=out.view(np.int16))
    np.bitwise_and(bits, np.int16(MAGNITUDE[dtype]), out=above)
    np.subtract(above, np.int16(low), out=above)  # what is below wraps around to large numbers
    return np.flatnonzero(above.view(np.uint16) > high - low)
