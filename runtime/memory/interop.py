"""Zero-copy tensors from numpy, `__cuda_array_interface__` and DLPack.

DLPack's structs are those of dlpack.h (version 0, the capsule named "dltensor"), read with ctypes
because numpy can read neither a CUDA tensor nor bfloat16.
"""

import contextlib
import ctypes
from typing import Any

import numpy as np

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.memory.cuda import call, on_device
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.memory.tensor import HOST, Tensor, tensor_from_numpy


def tensor_from(obj: object) -> Tensor:
    """Return `obj` as a tensor in the same memory.

    Args:
        obj: a `Tensor`, a numpy array, or what has `__cuda_array_interface__` or `__dlpack__`.

    Raises:
        TensorError: it is none of these, or its dtype, layout or device is not supported.
    """
    if isinstance(obj, Tensor):
        return obj
    if isinstance(obj, np.ndarray):
        return tensor_from_numpy(obj)
    if hasattr(obj, "__dlpack__"):  # first: it alone knows bfloat16 and the device
        return _tensor_from_dlpack(obj)
    if hasattr(obj, "__cuda_array_interface__"):
        return _tensor_from_cuda_array(obj)
    raise TensorError(
        f"cannot take a tensor from {type(obj).__name__}; pass a numpy array or an object with "
        "__dlpack__ or __cuda_array_interface__ (a torch or CuPy tensor)"
    )


def _tensor_from_cuda_array(obj: Any) -> Tensor:
    interface = obj.__cuda_array_interface__
    pointer, device = interface["data"][0], _cuda_index(obj, interface["data"][0])
    if interface.get("stream") is not None:  # whoever wrote the memory may still be writing
        with on_device(device):  # the stream may be the default one of that GPU
            call("cudaStreamSynchronize", interface["stream"])
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    in_elements = [stride // dtype.itemsize for stride in strides or ()]
    dense = strides is None or _is_row_major(shape, in_elements)
    if not dtype.isnative:
        raise TensorError(f"dtype {dtype} is not supported: its bytes are swapped")
    return _checked(Tensor(pointer, shape, dtype.name, f"cuda:{device}", owner=obj), dense=dense)


def _cuda_index(obj: Any, pointer: int) -> int:
    """GPU index of an object; from its library or from CUDA, as the interface lacks it."""
    device = getattr(obj, "device", None)
    index = getattr(device, "index", getattr(device, "id", None))  # torch; CuPy
    if index is None:  # Numba
        index = call("cudaPointerGetAttributes", pointer).device if pointer else 0
    return int(index)


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}  # DLDataTypeCode
_HOST_DEVICES, _CUDA_DEVICES = (1, 3), (2, 13)  # kDLCPU, kDLCUDAHost; kDLCUDA, kDLCUDAManaged


def _tensor_from_dlpack(obj: Any) -> Tensor:
    try:
        with _exporting(obj):
            capsule = obj.__dlpack__(stream=None)  # the default stream may read it at once
        raw = _DLTensor.from_address(_capsule_pointer(capsule))
    except (BufferError, RuntimeError, ValueError) as error:  # another version is a ValueError
        raise TensorError(f"{type(obj).__name__} does not give up its memory: {error}") from error
    shape = tuple(raw.shape[axis] for axis in range(raw.ndim))
    dense = not raw.strides or _is_row_major(shape, raw.strides)
    pointer = (raw.data or 0) + raw.byte_offset
    tensor = Tensor(pointer, shape, _dtype_name(raw.dtype), _device_name(raw.device), capsule)
    return _checked(tensor, dense=dense)


def _exporting(obj: Any) -> contextlib.AbstractContextManager[None]:
    """Make the object's GPU current: torch gives up memory, and orders its work, only there."""
    ask = getattr(obj, "__dlpack_device__", None)
    kind, index = ask() if ask else (_HOST_DEVICES[0], 0)
    return on_device(index) if kind in _CUDA_DEVICES else contextlib.nullcontext()


def _capsule_pointer(capsule: object) -> int:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    return int(get_pointer(capsule, b"dltensor"))


def _dtype_name(dtype: _DataType) -> str:
    name = _CODES.get(dtype.code, f"code-{dtype.code}-")
    lanes = "" if dtype.lanes == 1 else f"x{dtype.lanes}"
    return "bool" if name == "bool" else f"{name}{dtype.bits}{lanes}"


def _device_name(device: _Device) -> str:
    if device.type in _HOST_DEVICES:
        return HOST
    if device.type in _CUDA_DEVICES:
        return f"cuda:{device.index}"
    raise TensorError(f"DLPack device type {device.type} is not supported: neither CPU nor CUDA")


def _is_row_major(shape: tuple[int, ...], strides: Any) -> bool:
    expected = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] != 1 and strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def _checked(tensor: Tensor, *, dense: bool) -> Tensor:
    storage_dtype(tensor.dtype)  # refuses what there is none of
    if not dense:
        raise TensorError(
            f"a tensor of shape {tensor.shape} is not row-major; pass a contiguous copy"
        )
    return tensor
