"""Tensor dtypes: names, numpy storage, and checks for finite values."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import TensorError

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")
_STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES
}

# The bits of finite floats are below these, sign bit off.
_INFINITY = {
    np.dtype(dtype): np.array(np.inf, dtype).view(f"u{np.dtype(dtype).itemsize}").item()
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
}


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype that stores `dtype`.

    Raises:
        TensorError: no tensor has that dtype.
    """
    if dtype not in _STORAGE:
        raise TensorError(f"dtype {dtype!r} is not supported; choose from: {', '.join(DTYPES)}")
    return _STORAGE[dtype]


def is_finite(values: Array, scratch: Array | None = None) -> bool:
    """Return whether no element is NaN or infinite.

    By the bits: numpy's own `isfinite` takes 16-bit floats one by one. `scratch` is memory of the
    same shape and size of elements.
    """
    if values.dtype not in _INFINITY:  # an integer
        return True
    unsigned, sign = np.dtype(f"u{values.itemsize}"), 8 * values.itemsize - 1
    out = None if scratch is None else scratch.view(unsigned)
    magnitude = np.bitwise_and(values.view(unsigned), (1 << sign) - 1, out=out)
    return bool(magnitude.max(initial=0) < _INFINITY[values.dtype])
