"""bfloat16 arrays for polygraphy: torch's tensors on the same memory, and back."""

import ml_dtypes
import numpy as np
import torch

from trt_lora.scripts.verification.numpy_or_torch import as_numpy_or_torch, storage_of


def test_bfloat16_is_torchs_on_the_same_memory_and_comes_back_the_same() -> None:
    array = np.array([[1.5, -2.0, 0.1]], ml_dtypes.bfloat16)
    tensor = as_numpy_or_torch(array, "bfloat16")
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == array.astype(np.float32).tolist()
    tensor[0, 0] = 4.0
    assert array[0, 0] == 4.0
    back = storage_of(tensor)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_the_order_of_a_transposed_tensor_is_kept() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    assert storage_of(tensor).astype(np.float32).tolist() == tensor.float().tolist()


def test_other_dtypes_stay_numpys_and_are_not_copied() -> None:
    array = np.ones(3, np.float16)
    assert as_numpy_or_torch(array, "float16") is array
    assert storage_of(array) is array
