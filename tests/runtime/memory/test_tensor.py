"""Tensors seen in place."""

import copy
import dataclasses
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.memory.dtypes import DTYPES, Array, storage_dtype
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy, tensor_from_storage

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_storage_of_every_dtype_has_its_size(dtype: str) -> None:
    size = SIZES[dtype]
    assert storage_dtype(dtype).itemsize == size
    assert Tensor(0, (3, 5), dtype).nbytes == 15 * size


@pytest.mark.parametrize("dtype", ["float64", "int8", "bf16", "", "FLOAT32"])
def test_an_unknown_dtype_is_refused_with_the_choices(dtype: str) -> None:
    with pytest.raises(TensorError, match="choose from: float32, float16, bfloat16"):
        storage_dtype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int32", "bool"])
def test_an_array_is_taken_and_seen_in_place(dtype: str) -> None:
    array = np.ones((2, 3), dtype)
    tensor = tensor_from_numpy(array)
    assert (tensor.pointer, tensor.shape, tensor.dtype) == (array.ctypes.data, (2, 3), dtype)
    assert tensor.device == "cpu"
    array[1, 2] = 0
    for seen in (tensor.numpy(), tensor.storage()):
        assert np.shares_memory(seen, array)
        np.testing.assert_array_equal(seen, array)


def test_bfloat16_is_taken_and_stored_in_place_and_read_as_float32() -> None:
    array = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    tensor = tensor_from_numpy(array)
    assert (tensor.pointer, tensor.dtype, tensor.nbytes) == (array.ctypes.data, "bfloat16", 4)
    assert np.shares_memory(tensor.storage(), array)
    assert tensor.storage().dtype == array.dtype
    assert tensor.numpy().dtype == np.float32
    np.testing.assert_array_equal(tensor.numpy(), np.array([[1.5, -2]], np.float32))


def test_bits_are_taken_as_bfloat16_in_place() -> None:
    bits = np.array([[0x3FC0, 0xC000]], np.uint16)  # 1.5, -2
    tensor = tensor_from_storage(bits, "bfloat16")
    assert np.shares_memory(tensor.storage(), bits)
    np.testing.assert_array_equal(tensor.numpy(), np.array([[1.5, -2]], np.float32))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 0), (1, 2, 3)])
def test_every_shape_is_seen_as_it_is(shape: tuple[int, ...], dtype: Any) -> None:
    assert tensor_from_numpy(np.zeros(shape, dtype)).numpy().shape == shape


def test_a_tensor_keeps_its_memory_alive_and_so_does_what_was_read_from_it() -> None:
    array = np.arange(4, dtype=np.float32)
    alive = weakref.ref(array)
    tensor = tensor_from_numpy(array)
    del array
    assert alive() is not None
    values = tensor.numpy()
    del tensor
    assert alive() is not None
    del values
    assert alive() is None


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3), np.float32).T, np.zeros(6, np.int64)[::2], np.zeros((2, 4))[:, :2]]
)
def test_an_array_that_is_not_row_major_is_refused_and_never_copied(array: Array) -> None:
    with pytest.raises(TensorError, match=r"not row-major; pass numpy\.ascontiguousarray"):
        tensor_from_storage(array, "float32")


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint16", "complex64", "U3", "O"])
def test_an_array_of_an_unsupported_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(TensorError, match="is not supported; choose from"):
        tensor_from_numpy(np.zeros(2, dtype))


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">i8"])
def test_an_array_of_swapped_bytes_is_refused(dtype: str) -> None:
    with pytest.raises(TensorError):
        tensor_from_numpy(np.ones(2, dtype))


@pytest.mark.parametrize("read", [Tensor.storage, np.asarray])
def test_memory_of_a_gpu_cannot_be_seen_in_place(read: Callable[[Tensor], Array]) -> None:
    with pytest.raises(TensorError, match=r"on cuda:0 cannot be seen in place; call numpy\(\)"):
        read(Tensor(256, (2,), "float32", "cuda:0"))


def test_a_tensor_is_frozen_and_equal_only_to_itself() -> None:
    tensor = tensor_from_numpy(np.zeros(2, np.float32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tensor.pointer = 0  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    assert tensor != dataclasses.replace(tensor)
    assert len({tensor, dataclasses.replace(tensor)}) == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_an_address_is_not_carried_away_from_its_memory(
    duplicate: Callable[[object], object],
) -> None:
    tensor_map = TensorMap({"x": tensor_from_numpy(np.zeros(2, np.float32))})
    with pytest.raises(TypeError):
        duplicate(tensor_map)


def test_a_tensor_map_is_a_dict() -> None:
    tensor = Tensor(0, (), "float32")
    assert dict(TensorMap({"x": tensor})) == {"x": tensor}
