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


def batch_rows(manifest: Manifest, arrays: Mapping[str, Array]) -> int:
    """Return how many rows a run has: the first size of the inputs that begin with the batch.

    Raises:
        TensorError: no input begins with it, or they have different sizes.
    """
    batched = [b.name for b in manifest.inputs if b.shape[:1] == (manifest.batch,)]
    sizes = {name: np.shape(arrays[name])[:1] for name in batched if name in arrays}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise TensorError(
            f"a list of adapters has one for each row of the batch, and inputs with rows are: "
            f"{', '.join(f'{name} {list(size)}' for name, size in sizes.items()) or 'none'}; pass "
            "inputs of one size, or one adapter for all"
        )
    ((rows,),) = set(sizes.values())
    return int(rows)


def _tensor(array: Array, dtype: str) -> Tensor:
    if dtype == "bfloat16":  # which numpy alone does not have
        return tensor_from_storage(np.asarray(array, storage_dtype(dtype), order="C"), dtype)
    return tensor_from_numpy(np.asarray(array, order="C"))
