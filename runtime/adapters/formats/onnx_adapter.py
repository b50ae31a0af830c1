"""ONNX Runtime's `.onnx_adapter` files, read and written through ONNX Runtime.

Parameters are named as the engine's inputs, so that `RunOptions.add_active_adapter` feeds them.
"""

import ctypes
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.extras import extra
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.safetensors_file import check_tensor
from trt_lora.runtime.files.untrusted_file import AdapterFile, ReadBuffer
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.tensor import Tensor

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}
_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16


def adapter_from_onnxruntime(path: Path) -> Adapter:
    """Read an `.onnx_adapter` file: A [k, r], B [r, n], the scale in B.

    Raises:
        AdapterError: the file is missing or damaged, or has a dtype that LoRA weights do not have.
        BackendError: onnxruntime is not installed.
    """
    ort = _onnxruntime()
    size = AdapterFile(path).size  # a regular file, or an error of ours
    try:
        parameters = ort.AdapterFormat.read_adapter(str(path)).get_parameters()
        weights = {name: _weight(name, value, path) for name, value in parameters.items()}
    except AdapterError:  # a ValueError too
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise AdapterError(f"{path} is not a valid .onnx_adapter file: {error}") from error
    if not weights:
        raise AdapterError(f"{path} holds no parameters; convert the adapter again")
    nbytes = sum(Tensor(0, weight.shape, weight.dtype).nbytes for weight in weights.values())
    if nbytes > size:  # the format lets parameters share their elements
        raise AdapterError(f"{path} has {size} bytes, but {nbytes} bytes of parameters")
    return Adapter(str(path), weights)


def _weight(name: str, value: Any, path: Path) -> Weight:
    dtype, shape = _TYPES.get(value.data_type()), tuple(value.shape())
    if dtype is None:
        raise AdapterError(f"{path}: {name} is {value.data_type()}; expected {', '.join(_TYPES)}")
    check_tensor(name, shape, path)

    def read(buffer: ReadBuffer | None = None) -> Array:  # its numpy() does not know bfloat16
        storage = np.empty(shape, storage_dtype(dtype))
        ctypes.memmove(storage.ctypes.data, value.data_ptr(), storage.nbytes)
        return storage

    return Weight((name,), shape, dtype, read)


def save_onnxruntime(weights: dict[str, Weight], path: Path, dtype: str, source: str) -> Conversion:
    """Write weights by the names of the engine's inputs.

    Raises:
        AdapterError: a value leaves the range of `dtype`.
        BackendError: onnxruntime is not installed.
        OSError: the file cannot be written.
    """
    ort = _onnxruntime()
    tensors, conversions = pack_weights(weights, dict.fromkeys(weights, dtype), source)
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({name: _value(ort, tensor) for name, tensor in tensors.items()})
    try:
        adapter.export_adapter(str(path))
    except RuntimeError as error:
        raise OSError(f"{path.name} cannot be written; the disk may be full") from error
    return Conversion.of_all(conversions.values())


def _value(ort: Any, tensor: Tensor) -> Any:
    if tensor.dtype == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.storage(), _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(tensor.storage())


def _onnxruntime() -> Any:
    with extra("cpu", "an .onnx_adapter file"):
        return importlib.import_module("onnxruntime")
