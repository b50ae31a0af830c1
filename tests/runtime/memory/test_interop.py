"""Tensors of other libraries, taken in place: numpy, DLPack and `__cuda_array_interface__`."""

import ctypes
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Work

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.memory.cuda import call
from trt_lora.runtime.memory.interop import tensor_from
from trt_lora.runtime.memory.tensor import Tensor

pytestmark = pytest.mark.needs_torch

CPU, CUDA, CUDA_HOST, CUDA_MANAGED, ROCM = 1, 2, 3, 13, 10  # DLDeviceType
FLOAT, BFLOAT = 2, 4  # DLDataTypeCode
ON_FIRST = SimpleNamespace(index=0)  # a device as torch has it
Int64s = ctypes.POINTER(ctypes.c_int64)


class DLManagedTensor(ctypes.Structure):
    """As in dlpack.h, version 0, written out a second time."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", Int64s),
        ("strides", Int64s),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class DLPackObject:
    """A [4, 2] tensor at address 4096 of GPU 1, as CuPy or JAX would hand it over."""

    name = b"dltensor"

    def __init__(
        self,
        *,
        device: tuple[int, int] = (CUDA, 1),
        dtype: tuple[int, int, int] = (FLOAT, 32, 1),
        strides: Sequence[int] | None = None,
        byte_offset: int = 0,
        shape: Sequence[int] = (4, 2),
    ) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides) if strides else 0
        self._managed = DLManagedTensor(
            4096, *device, len(shape), *dtype,
            ctypes.cast(self._shape, Int64s), ctypes.cast(self._strides, Int64s), byte_offset,
        )  # fmt: skip

    def __dlpack__(self, stream: object = None) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._managed), self.name, None)


class CudaArray:
    """What has `__cuda_array_interface__`, on the device that its library names."""

    def __init__(self, device: object = ON_FIRST, **interface: object) -> None:
        self.device = device
        self.__cuda_array_interface__ = {
            "shape": (4, 2), "typestr": "<f4", "data": (4096, False), "version": 3, **interface,
        }  # fmt: skip


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(devices=2)
    fake.install(monkeypatch)
    return fake


def assert_at_4096(tensor: Tensor, dtype: str, device: str) -> None:
    assert (tensor.pointer, tensor.shape) == (4096, (4, 2))
    assert (tensor.dtype, tensor.device) == (dtype, device)


# ---------------------------------------------------------------------------------- host libraries


def test_a_tensor_is_returned_as_it_is() -> None:
    tensor = Tensor(4096, (2,), "float32", "cuda:0")
    assert tensor_from(tensor) is tensor


def test_a_numpy_array_is_taken_in_place() -> None:
    array = np.arange(8, dtype=np.float16).reshape(4, 2)
    tensor = tensor_from(array)
    assert (tensor.pointer, tensor.shape, tensor.dtype) == (array.ctypes.data, (4, 2), "float16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int32", "bool"])
def test_a_torch_tensor_is_taken_in_place(dtype: str) -> None:
    source = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]).to(getattr(torch, dtype))
    tensor = tensor_from(source)
    assert (tensor.pointer, tensor.shape) == (source.data_ptr(), (4, 2))
    assert (tensor.dtype, tensor.device) == (dtype, "cpu")
    np.testing.assert_array_equal(tensor.numpy(), source.to(torch.float32).numpy())


def test_a_view_into_a_torch_tensor_starts_where_the_view_does() -> None:
    source = torch.arange(8, dtype=torch.float32).reshape(4, 2)[1:]
    np.testing.assert_array_equal(tensor_from(source).numpy(), [[2, 3], [4, 5], [6, 7]])


def test_memory_behind_a_capsule_lives_as_long_as_the_tensor_and_no_longer() -> None:
    array = np.arange(3, dtype=np.float32)
    alive = weakref.ref(array)
    tensor = tensor_from(SimpleNamespace(__dlpack__=array.__dlpack__))
    del array
    assert alive() is not None
    np.testing.assert_array_equal(tensor.numpy(), [0, 1, 2])
    del tensor
    assert alive() is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(2, requires_grad=True), r"use tensor\.detach"),
        (torch.zeros(2, 2).to_sparse(), "torch.strided"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(4, 2).T, "is not row-major; pass a contiguous copy"),
        (torch.zeros(4, 4)[:, :2], "is not row-major"),
        (torch.zeros(2).expand(3, 2), "is not row-major"),
        (torch.zeros(2, dtype=torch.float64), "dtype float64 is not supported"),
        (torch.zeros(2, dtype=torch.int8), "dtype int8 is not supported"),
        (torch.zeros(2, dtype=torch.uint16), "dtype uint16 is not supported"),
        (torch.zeros(2, dtype=torch.complex64), "is not supported; choose from: float32"),
    ],
)
def test_a_torch_tensor_that_cannot_be_taken_in_place_is_refused(
    source: torch.Tensor, message: str
) -> None:
    with pytest.raises(TensorError, match=message):
        tensor_from(source)


@pytest.mark.parametrize("obj", [None, "weights", [[1.0]], 1.0, np.float32(1), object(), b"1234"])
def test_what_is_no_tensor_is_refused_by_its_type(obj: object) -> None:
    with pytest.raises(TensorError, match=f"from {type(obj).__name__}; pass a numpy array or"):
        tensor_from(obj)


# ----------------------------------------------------------------------------- DLPack of other GPUs


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ((CUDA, 0), "cuda:0"),
        ((CUDA, 1), "cuda:1"),
        ((CUDA_MANAGED, 1), "cuda:1"),
        ((CPU, 0), "cpu"),
        ((CUDA_HOST, 1), "cpu"),
    ],
)
def test_dlpack_says_which_device(device: tuple[int, int], name: str) -> None:
    assert_at_4096(tensor_from(DLPackObject(device=device)), "float32", name)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ((FLOAT, 16, 1), "float16"),
        ((BFLOAT, 16, 1), "bfloat16"),
        ((0, 64, 1), "int64"),
        ((6, 8, 1), "bool"),
    ],
)
def test_dlpack_says_which_dtype(dtype: tuple[int, int, int], name: str) -> None:
    assert_at_4096(tensor_from(DLPackObject(dtype=dtype)), name, "cuda:1")


def test_the_byte_offset_is_part_of_the_address() -> None:
    assert tensor_from(DLPackObject(byte_offset=512)).pointer == 4096 + 512


@pytest.mark.parametrize(("shape", "strides"), [((4, 2), (2, 1)), ((1, 8), (99, 1)), ((), ())])
def test_row_major_strides_are_taken(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert tensor_from(DLPackObject(shape=shape, strides=strides)).shape == shape


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DLPackObject(strides=(1, 4)), r"shape \(4, 2\) is not row-major"),
        (DLPackObject(strides=(4, 1)), "is not row-major"),
        (DLPackObject(dtype=(FLOAT, 32, 4)), "float32x4"),
        (DLPackObject(dtype=(FLOAT, 8, 1)), "float8"),
        (DLPackObject(dtype=(99, 8, 1)), "code-99-8"),
        (DLPackObject(device=(ROCM, 0)), "device type 10 is not supported: neither CPU nor CUDA"),
    ],
)
def test_a_dlpack_tensor_that_an_engine_cannot_read_is_refused(
    source: DLPackObject, message: str
) -> None:
    with pytest.raises(TensorError, match=message):
        tensor_from(source)


class Versioned(DLPackObject):
    """Hands over the capsule of DLPack 1, whose struct begins otherwise."""

    name = b"dltensor_versioned"


@pytest.mark.parametrize(
    "source", [Versioned(), SimpleNamespace(__dlpack__=lambda stream=None: None)]
)
def test_what_is_no_capsule_of_version_0_is_refused(source: object) -> None:
    with pytest.raises(TensorError, match=type(source).__name__):
        tensor_from(source)


# ------------------------------------------------------------------------- __cuda_array_interface__


@pytest.mark.parametrize(("typestr", "dtype"), [("<f4", "float32"), ("<f2", "float16")])
def test_a_cuda_array_is_taken_in_place_and_kept_alive(typestr: str, dtype: str) -> None:
    source = CudaArray(typestr=typestr)
    tensor = tensor_from(source)
    assert_at_4096(tensor, dtype, "cuda:0")
    assert tensor.owner is source


@pytest.mark.parametrize("device", [SimpleNamespace(index=1), SimpleNamespace(id=1)])
def test_a_cuda_array_is_on_the_gpu_that_torch_or_cupy_names(device: object) -> None:
    assert_at_4096(tensor_from(CudaArray(device)), "float32", "cuda:1")


def test_the_stream_that_writes_a_cuda_array_is_waited_for(two_gpus: FakeCuda) -> None:
    two_gpus.current_device = 1
    address, written = int(call("cudaMallocAsync", 256, 0)), list[int]()
    two_gpus.enqueue(Work("a kernel", 0, (), lambda: written.append(two_gpus.current_device)))
    two_gpus.current_device = 0
    data = (address, False)
    tensor_from(CudaArray(SimpleNamespace(id=1), data=data))
    assert not written
    tensor_from(CudaArray(SimpleNamespace(id=1), data=data, stream=0))
    assert written == [1]
    assert two_gpus.current_device == 0


def test_a_cuda_array_that_names_no_gpu_is_where_its_memory_is(two_gpus: FakeCuda) -> None:
    two_gpus.current_device = 1
    address = int(call("cudaMallocAsync", 256, 0))
    two_gpus.current_device = 0
    assert tensor_from(CudaArray(None, data=(address, False))).device == "cuda:1"
    assert tensor_from(CudaArray(None, data=(0, False), shape=(0,))).device == "cuda:0"


def test_dlpack_is_asked_for_on_the_objects_gpu_and_the_thread_keeps_its_own(
    two_gpus: FakeCuda,
) -> None:
    class OfTorch(DLPackObject):
        def __dlpack_device__(self) -> tuple[int, int]:
            return CUDA, 1

        def __dlpack__(self, stream: object = None) -> object:
            if two_gpus.current_device != 1:
                raise BufferError("Can't export tensors on a different CUDA device index")
            return super().__dlpack__(stream)

    assert_at_4096(tensor_from(OfTorch()), "float32", "cuda:1")
    assert two_gpus.current_device == 0


@pytest.mark.parametrize("strides", [None, (8, 4)])
def test_row_major_strides_of_a_cuda_array_are_taken(strides: object) -> None:
    assert_at_4096(tensor_from(CudaArray(strides=strides)), "float32", "cuda:0")


def test_the_stride_of_a_dimension_of_one_does_not_matter() -> None:
    assert tensor_from(CudaArray(shape=(8, 1), strides=(4, 64))).shape == (8, 1)


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ({"strides": (4, 16)}, "is not row-major"),
        ({"strides": (16, 4)}, "is not row-major"),
        ({"typestr": "<f8"}, "dtype float64 is not supported"),
        ({"typestr": "<V2"}, "is not supported"),
        ({"typestr": ">f4"}, "is not supported"),
    ],
)
def test_a_cuda_array_that_an_engine_cannot_read_is_refused(
    interface: dict[str, object], message: str
) -> None:
    with pytest.raises(TensorError, match=message):
        tensor_from(CudaArray(**interface))


class TorchCudaBfloat16(DLPackObject):
    """A bfloat16 tensor of torch on a GPU: its array interface says `<V2`, DLPack says bfloat16."""

    def __init__(self) -> None:
        super().__init__(dtype=(BFLOAT, 16, 1))
        self.__cuda_array_interface__ = CudaArray(typestr="<V2").__cuda_array_interface__


def test_a_bfloat16_torch_tensor_on_a_gpu_is_taken_in_place() -> None:
    assert_at_4096(tensor_from(TorchCudaBfloat16()), "bfloat16", "cuda:1")


class TorchCudaParameter:
    """A parameter of torch on a GPU: hasattr meets a RuntimeError, not an AttributeError."""

    @property
    def __cuda_array_interface__(self) -> object:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")

    def __dlpack__(self, stream: object = None) -> object:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


def test_a_torch_parameter_on_a_gpu_is_refused_with_torchs_own_words() -> None:
    with pytest.raises(TensorError, match="grad"):
        tensor_from(TorchCudaParameter())
