"""Arrays as polygraphy takes them: numpy's, but torch's for bfloat16, which numpy does not have."""

from typing import Any

import ml_dtypes
import numpy as np

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.memory.dtypes import Array


def as_numpy_or_torch(array: Array, dtype: str) -> Any:
    """Return storage of `dtype` in place: torch's tensor for bfloat16, else the array itself.

    Raises:
        BackendError: bfloat16 without torch.
    """
    if dtype != "bfloat16":
        return array
    try:
        import torch
    except ImportError as error:
        raise BackendError(
            f"bfloat16 needs {error.name}; pip install 'trt-lora[export]'"
        ) from error
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def storage_of(value: Any) -> Array:
    """Return the storage of a value of `as_numpy_or_torch`; an array is returned as it is."""
    if isinstance(value, np.ndarray):
        return value
    import torch

    bits: Array = value.contiguous().view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)
