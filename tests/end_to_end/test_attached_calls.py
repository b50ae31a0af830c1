"""Tensors of a pipeline's call as arrays of an engine's inputs, and back."""

import torch

from trt_lora.runtime.manifest import Binding
from trt_lora.runtime.pipelines.attached.calls import Call, arrays_of, tensors_of


def test_arrays_have_the_engines_dtypes_and_torchs_memory() -> None:
    same, other = torch.rand(2, 3), torch.rand(2, 3, dtype=torch.float64)
    kinds = {"same": "float32", "half": "float16", "rounded": "bfloat16", "time": "float32"}
    own = [Binding(name, dtype, ("batch",)) for name, dtype in kinds.items()]
    call = Call({"same": same, "half": other, "rounded": other, "time": 7})
    arrays = arrays_of(call, own)
    assert arrays["same"].ctypes.data == same.data_ptr()
    assert {name: str(array.dtype) for name, array in arrays.items()} == kinds | {
        "rounded": "float32"  # which the run rounds
    }
    assert arrays["time"].tolist() == [7, 7]
    back = tensors_of(arrays, own, "cpu")
    assert {name: str(t.dtype) for name, t in back.items()} == {
        name: f"torch.{dtype}" for name, dtype in kinds.items()
    }
