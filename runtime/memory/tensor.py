"""Tensor as an engine sees it: address, shape, dtype and device."""

import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

HOST = "cpu"


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """Memory that somebody else owns, kept alive as long as the tensor is.

    The memory is dense and row-major. Making a tensor copies nothing.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str  # one of DTYPES
    device: str = HOST  # "cpu" or "cuda:<index>"
    owner: object = field(default=None, repr=False)  # released only after the tensor

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse: the copy would point into memory that it does not own."""
        raise TypeError("a Tensor cannot be copied; copy what numpy() returns")

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as `__deepcopy__` does."""
        self.__deepcopy__(None)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * storage_dtype(self.dtype).itemsize

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The numpy protocol by which `storage` sees the memory in place, bfloat16 as two bytes.

        Raises:
            TensorError: the tensor is not in host memory.
        """
        if self.device != HOST:
            raise TensorError(f"a tensor on {self.device} cannot be seen in place; call numpy()")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": storage_dtype(self.dtype).str,
            "data": (self.pointer, False),
        }

    def storage(self) -> Array:
        """Return the elements in place.

        Raises:
            TensorError: the tensor is not in host memory.
        """
        return np.asarray(self).view(storage_dtype(self.dtype))

    def read_storage(self) -> Array:
        """Return the elements: in place on the host, a copy from a GPU."""
        if self.device == HOST:
            return self.storage()
        from trt_lora.runtime.memory.cuda import read

        storage = np.empty(self.shape, storage_dtype(self.dtype))
        read(int(self.device.removeprefix("cuda:")), self.pointer, storage)
        return storage

    def numpy(self) -> Array:
        """Return the values: in place on the host, a copy from a GPU, bfloat16 as float32."""
        storage = self.read_storage()
        return storage.astype(np.float32) if self.dtype == "bfloat16" else storage


@dataclass(frozen=True, eq=False)
class ZeroMemory:
    """Owner of zeros that nobody writes to, so that a run need not read them."""

    memory: object = field(repr=False)  # released only after this


class TensorMap(dict[str, Tensor]):
    """Binding name -> tensor: what an executor runs on."""

    def __repr__(self) -> str:
        """Return how many tensors it has."""
        return f"<TensorMap of {len(self)} tensors>"


def tensor_from_storage(storage: Array, dtype: str) -> Tensor:
    """Return a tensor in the memory of `storage`, whose elements are of `dtype`.

    Raises:
        TensorError: the array is not dense and row-major; making it so would be a copy.
    """
    if not storage.flags.c_contiguous:
        raise TensorError(
            f"an array of shape {storage.shape} and strides {storage.strides} is not row-major; "
            "pass numpy.ascontiguousarray(array)"
        )
    pointer = storage.__array_interface__["data"][0]
    return Tensor(pointer, storage.shape, dtype, HOST, storage)


def tensor_from_numpy(array: Array) -> Tensor:
    """Return a tensor in the memory of a numpy array.

    Raises:
        TensorError: its dtype is not supported, or it is not row-major.
    """
    storage_dtype(array.dtype.name)
    if not array.dtype.isnative:
        raise TensorError(
            f"dtype {array.dtype} has swapped bytes; pass array.astype({array.dtype.name!r})"
        )
    return tensor_from_storage(array, array.dtype.name)
