"""Tensors seen in place, and bfloat16 against torch's own rounding."""

import copy
import dataclasses
import pickle
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.tensors import (
    DTYPES,
    Array,
    Tensor,
    TensorMap,
    narrow,
    storage_dtype,
    tensor_from_numpy,
    tensor_from_storage,
    widen,
)


def every_bfloat16() -> Array:
    """Bits of all bfloat16 values that are numbers."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    return bits[np.isfinite(widen(bits, "bfloat16"))]


def dense_float32() -> Array:
    """Finite float32 values at, just beside and half-way between all bfloat16 values."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF], np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16) | low
    values = bits.view(np.float32).ravel()
    return values[np.isfinite(values)]


def bits_of(tensor: torch.Tensor) -> Array:
    return np.asarray(tensor.view(torch.int16).numpy().view(np.uint16))


# ---------------------------------------------------------------------------------- widen, narrow


def test_every_bfloat16_widens_to_the_value_that_torch_gives_it() -> None:
    bits = every_bfloat16()
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widen(bits, "bfloat16").view(np.uint32), expected.view(np.uint32))


def test_narrowing_to_bfloat16_rounds_as_torch_does() -> None:
    values = dense_float32()
    expected = bits_of(torch.from_numpy(values).to(torch.bfloat16))
    np.testing.assert_array_equal(narrow(values, "bfloat16"), expected)


def test_narrowing_to_float16_rounds_as_torch_does() -> None:
    values = dense_float32()
    expected = bits_of(torch.from_numpy(values).to(torch.float16))
    np.testing.assert_array_equal(narrow(values, "float16").view(np.uint16), expected)


def test_narrowing_a_widened_bfloat16_gives_its_bits_back() -> None:
    bits = every_bfloat16()
    np.testing.assert_array_equal(narrow(widen(bits, "bfloat16"), "bfloat16"), bits)


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 3.4e38), ("float16", 65520.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_beyond_the_range_becomes_infinity(dtype: str, value: float, sign: int) -> None:
    narrowed = widen(narrow(np.array([sign * value], np.float32), dtype), dtype)
    np.testing.assert_array_equal(narrowed, [sign * np.inf])


def test_float32_is_neither_widened_nor_narrowed() -> None:
    values = np.ones((2, 3), np.float32)
    assert widen(values, "float32") is values
    assert narrow(values, "float32") is values


def test_the_shape_survives_both_ways() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(widen(narrow(values, "bfloat16"), "bfloat16"), values)


# ----------------------------------------------------------------------------------------- tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_storage_of_every_dtype_has_its_size(dtype: str) -> None:
    size = getattr(torch, dtype).itemsize
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


def test_bfloat16_is_stored_as_bits_and_read_as_float32() -> None:
    bits = np.array([[0x3FC0, 0xC000]], np.uint16)  # 1.5, -2
    tensor = tensor_from_storage(bits, "bfloat16")
    assert np.shares_memory(tensor.storage(), bits)
    assert tensor.nbytes == 4
    np.testing.assert_array_equal(tensor.numpy(), np.array([[1.5, -2]], np.float32))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 0), (1, 2, 3)])
def test_every_shape_is_seen_as_it_is(shape: tuple[int, ...]) -> None:
    assert tensor_from_numpy(np.zeros(shape, np.float32)).numpy().shape == shape


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
