"""Inputs of a graph's run, from arrays by name."""

from collections.abc import Mapping

import numpy as np

from trt_lora.plugins.errors import TensorError
from trt_lora.plugins.messages import did_you_mean
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy, tensor_from_storage


def graph_inputs(manifest: Manifest, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return arrays as tensors, in their own memory where dtype and layout allow it.

    Args:
        manifest: of the engine.
        arrays: of inputs that are not LoRA's; floats are rounded where bfloat16 is asked for.

    Raises:
        TensorError: there is no such input, or no tensor has its dtype.
    """
    own = {b.name: b.dtype for b in manifest.inputs if b.name not in manifest.lora_inputs}
    if unknown := [name for name in arrays if name not in own]:
        raise TensorError(
            f"the graph has no input {unknown[0]!r}; its inputs are: {', '.join(own)}"
            f"{did_you_mean(unknown[0], own)}"
        )
    return {name: _tensor(array, own[name]) for name, array in arrays.items()}


def _tensor(array: Array, dtype: str) -> Tensor:
    if dtype == "bfloat16":  # which numpy alone does not have
        return tensor_from_storage(np.asarray(array, storage_dtype(dtype), order="C"), dtype)
    return tensor_from_numpy(np.asarray(array, order="C"))
