"""`runtime/cuda.py` on a fake CUDA runtime, and the fake against the real one."""

import importlib
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
from fake_cuda import ALIGNMENT, CopyKind, FakeCuda, Status, Violation, Work

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.runtime.cuda import CudaMemory, call, cuda_obstacle, release
from trt_lora.runtime.memory import Memory
from trt_lora.runtime.tensors import Tensor, tensor_from_numpy, tensor_from_storage

TO_DEVICE, TO_HOST = CopyKind.cudaMemcpyHostToDevice, CopyKind.cudaMemcpyDeviceToHost


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU on which every test must leave nothing behind."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    yield fake
    fake.check()


def arrays() -> dict[str, np.ndarray]:
    """Arrays of several dtypes and of sizes that no alignment fits, one of them empty."""
    return {
        "a": np.arange(5, dtype=np.float32),
        "empty": np.empty((2, 0, 3), np.float16),
        "b": np.arange(77, dtype=np.int64).reshape(7, 11),
        "c": np.array([True, False, True]),
    }


def host_tensors() -> dict[str, Tensor]:
    """Return `arrays()` as tensors."""
    return {name: tensor_from_numpy(array) for name, array in arrays().items()}


# The memory of a GPU.


def test_an_upload_moves_all_host_tensors_by_one_copy_from_pinned_memory(cuda: FakeCuda) -> None:
    tensors = CudaMemory().upload(host_tensors())

    (copy,) = cuda.copies
    assert copy.kind is TO_DEVICE
    assert copy.source_is_pinned
    assert cuda.names().count("cudaMallocAsync") == 1
    assert copy.target <= min(tensor.pointer for tensor in tensors.values())


def test_uploaded_tensors_are_aligned_apart_and_have_the_values_of_the_host(cuda: FakeCuda) -> None:
    tensors = CudaMemory().upload(host_tensors())

    ends = 0
    for name, array in arrays().items():
        tensor = tensors[name]
        assert tensor.device == "cuda:0"
        assert tensor.pointer % ALIGNMENT == 0
        assert tensor.pointer >= ends
        ends = tensor.pointer + tensor.nbytes
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert list(tensors) == list(arrays())


def test_a_bfloat16_tensor_comes_back_as_the_float32_it_stands_for(cuda: FakeCuda) -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    tensor = CudaMemory().upload({"x": tensor_from_storage(bits, "bfloat16")})["x"]

    np.testing.assert_array_equal(tensor.numpy(), np.array([1.0, -2.0], np.float32))


def test_an_upload_leaves_tensors_of_its_gpu_where_they_are_and_asks_nothing_of_cuda(
    cuda: FakeCuda,
) -> None:
    memory = CudaMemory()
    first = memory.upload(host_tensors())
    before = list(cuda.calls)

    second = memory.upload(first)

    assert cuda.calls == before
    assert all(second[name] is first[name] for name in first)


def test_an_upload_of_both_kinds_copies_only_the_host_tensors(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    there = memory.upload({"there": tensor_from_numpy(np.ones(100, np.float32))})["there"]

    tensors = memory.upload({"here": tensor_from_numpy(np.zeros(3, np.int64)), "there": there})

    assert tensors["there"] is there
    assert cuda.copies[-1].nbytes <= ALIGNMENT
    np.testing.assert_array_equal(tensors["here"].numpy(), [0, 0, 0])


def test_tensors_of_no_bytes_are_uploaded_to_an_aligned_address(cuda: FakeCuda) -> None:
    tensor = CudaMemory().upload({"x": tensor_from_numpy(np.empty((1, 0), np.float32))})["x"]

    assert tensor.pointer
    assert tensor.pointer % ALIGNMENT == 0
    assert tensor.numpy().shape == (1, 0)


def test_an_upload_may_happen_on_a_stream_of_the_caller(cuda: FakeCuda) -> None:
    stream = call("cudaStreamCreate")
    tensor = CudaMemory().upload(host_tensors(), stream)["b"]
    call("cudaStreamDestroy", stream)

    assert cuda.copies[0].stream == int(stream)
    np.testing.assert_array_equal(tensor.numpy(), arrays()["b"])


def test_a_tensor_of_another_gpu_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(TensorError, match="weights is on cuda:1, the engine on cuda:0"):
        CudaMemory().upload({"weights": Tensor(ALIGNMENT, (1,), "float32", "cuda:1")})

    assert not cuda.calls


def test_a_device_tensor_that_is_not_aligned_is_refused_by_name(cuda: FakeCuda) -> None:
    with pytest.raises(TensorError, match=r"weights is at address 0x104, .* multiple of 256"):
        CudaMemory().upload({"weights": Tensor(0x104, (1,), "float32", "cuda:0")})

    assert not cuda.calls


@pytest.mark.parametrize(
    "function", ["cudaMallocAsync", "cudaMallocHost", "cudaMemcpyAsync", "cudaStreamSynchronize"]
)
def test_an_upload_that_fails_says_what_failed_and_leaves_nothing_behind(
    cuda: FakeCuda, function: str
) -> None:
    cuda.fail(function, Status.cudaErrorMemoryAllocation)

    with pytest.raises(
        BackendError, match=rf"{function}: out of memory \(cudaErrorMemoryAllocation\)"
    ):
        CudaMemory().upload(host_tensors())

    assert not cuda.live_blocks()


def test_an_upload_on_a_lost_device_reports_the_first_call_that_failed(cuda: FakeCuda) -> None:
    cuda.lose_device_at("cudaMemcpyAsync")

    with pytest.raises(BackendError, match="cudaMemcpyAsync: an illegal memory access"):
        CudaMemory().upload(host_tensors())


def test_zeros_are_zero_for_every_stream_at_once(cuda: FakeCuda) -> None:
    tensor = CudaMemory().zeros(1000)
    seen: list[int] = []
    stream = call("cudaStreamCreate")
    blocks = cuda.blocks_at(tensor.pointer, 1000, "a test")
    view = cuda.view(tensor.pointer, 1000)
    cuda.enqueue(Work("a kernel", int(stream), blocks, lambda: seen.append(int(view.max()))))
    call("cudaStreamSynchronize", stream)
    call("cudaStreamDestroy", stream)

    assert seen == [0]
    assert (tensor.shape, tensor.dtype, tensor.device) == ((1000,), "bool", "cuda:0")


def test_zeros_that_cannot_be_written_leave_nothing_behind(cuda: FakeCuda) -> None:
    cuda.fail("cudaMemsetAsync", Status.cudaErrorInvalidValue)

    with pytest.raises(BackendError, match="cudaMemsetAsync: invalid argument"):
        CudaMemory().zeros(8)

    assert not cuda.live_blocks()


def test_empty_tensors_share_one_buffer_without_overlap(cuda: FakeCuda) -> None:
    tensors = CudaMemory().empty([("x", "float32", (65,)), ("y", "int64", (2, 3))])

    assert len(cuda.live_blocks()) == 1
    assert tensors["y"].pointer == tensors["x"].pointer + 2 * ALIGNMENT
    assert tensors["y"].shape == (2, 3)
    assert not cuda.copies


def test_memory_is_freed_once_when_the_last_tensor_in_it_is_gone(cuda: FakeCuda) -> None:
    tensors = CudaMemory().upload(host_tensors())
    last = tensors.pop("b")
    tensors.clear()
    np.testing.assert_array_equal(last.numpy(), arrays()["b"])

    del last
    assert cuda.names().count("cudaFreeAsync") == 1
    assert not cuda.live_blocks()


def test_a_read_from_the_gpu_waits_for_the_copy(cuda: FakeCuda) -> None:
    tensor = CudaMemory().upload(host_tensors())["a"]
    before = len(cuda.calls)

    np.testing.assert_array_equal(tensor.numpy(), arrays()["a"])

    assert cuda.names()[before:] == ["cudaMemcpyAsync", "cudaStreamSynchronize"]


def test_memory_of_a_gpu_is_named_by_its_number(cuda: FakeCuda) -> None:
    memory: Memory = CudaMemory(3)

    assert memory.device == "cuda:3"
    assert memory.zeros(1).device == "cuda:3"


def test_memory_of_a_lost_device_is_let_go_of_in_silence(cuda: FakeCuda) -> None:
    tensor = CudaMemory().zeros(8)
    cuda.lose_device_at("cudaFreeAsync")

    del tensor  # an exception in a finalizer would fail this test as a warning

    assert cuda.names()[-1] == "cudaFreeAsync"


def test_memory_alive_when_python_ends_is_freed_in_silence() -> None:
    program = """
        import atexit, sys
        import fake_cuda
        cuda = fake_cuda.FakeCuda()
        atexit.register(lambda: print("left:", cuda.live_blocks(), cuda.violations))
        sys.modules["cuda.bindings.runtime"] = cuda
        from trt_lora.runtime.cuda import CudaMemory
        tensor = CudaMemory().zeros(8)
        print("held:", len(cuda.live_blocks()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(fake_cuda.__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["held: 1", "left: [] []"]
    assert not done.stderr


# Calls, and whether there is a GPU.


def test_a_call_returns_the_one_result_or_none(cuda: FakeCuda) -> None:
    assert call("cudaGetDeviceCount") == 1
    assert call("cudaStreamSynchronize", 0) is None


def test_a_gpu_is_no_obstacle_and_only_the_count_is_asked_for(cuda: FakeCuda) -> None:
    assert not cuda_obstacle()
    assert cuda.names() == ["cudaGetDeviceCount"]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (Status.cudaErrorInsufficientDriver, "driver version is insufficient"),
        (Status.cudaErrorNoDevice, "no CUDA-capable device is detected"),
        (RuntimeError("Failed to dlopen libcuda.so.1"), "Failed to dlopen libcuda.so.1"),
    ],
)
def test_no_driver_and_no_gpu_are_obstacles_in_the_words_of_nvidia(
    cuda: FakeCuda, reason: Status | RuntimeError, message: str
) -> None:
    cuda.fail("cudaGetDeviceCount", reason)

    assert message in cuda_obstacle()


@pytest.mark.skipif(not importlib.util.find_spec("cuda"), reason="needs cuda-python")
def test_the_real_runtime_says_whether_there_is_a_gpu() -> None:
    obstacle = cuda_obstacle()

    assert not obstacle or "NVIDIA GPU" in obstacle or obstacle.startswith("cudaGetDeviceCount: ")


def test_a_count_of_no_gpus_is_an_obstacle(cuda: FakeCuda) -> None:
    cuda.devices = 0

    assert cuda_obstacle() == "there is no NVIDIA GPU"


def test_a_missing_cuda_python_is_an_obstacle_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)

    assert "cuda-python cannot be imported" in cuda_obstacle()
    assert "pip install 'trt-lora[rtx]'" in cuda_obstacle()


def test_releasing_forgives_a_failed_call_but_no_broken_rule(cuda: FakeCuda) -> None:
    cuda.fail("cudaStreamDestroy", Status.cudaErrorIllegalAddress)
    release("cudaStreamDestroy", 1)

    with pytest.raises(Violation, match="there is no stream 1"):
        release("cudaStreamDestroy", 1)
    cuda.violations.clear()


# The fake: it has NVIDIA's signatures, and it catches what it says it catches.


FUNCTIONS = sorted(name for name in vars(FakeCuda) if name.startswith("cuda") and name[4].isupper())


@pytest.mark.skipif(not importlib.util.find_spec("cuda"), reason="needs cuda-python")
def test_the_fake_functions_take_as_many_arguments_as_the_real_ones() -> None:
    real = importlib.import_module("cuda.bindings.runtime")

    functions = [name for name in FUNCTIONS if name != "cudaMemcpyKind"]
    assert {name: len(inspect.signature(getattr(real, name)).parameters) for name in functions} == {
        name: len(inspect.signature(getattr(FakeCuda(), name)).parameters) for name in functions
    }


@pytest.mark.skipif(not importlib.util.find_spec("cuda"), reason="needs cuda-python")
def test_the_fake_constants_and_texts_are_the_real_ones() -> None:
    real = importlib.import_module("cuda.bindings.runtime")

    for status in Status:
        assert int(getattr(real.cudaError_t, status.name)) == status
    for status, text in fake_cuda.TEXTS.items():
        assert real.cudaGetErrorString(getattr(real.cudaError_t, status.name))[1] == text
    for kind in CopyKind:
        assert int(getattr(real.cudaMemcpyKind, kind.name)) == kind


def synced_block(cuda: FakeCuda) -> int:
    """Return the address of memory that is ready for every stream."""
    _, address = cuda.cudaMallocAsync(ALIGNMENT, 0)
    cuda.cudaStreamSynchronize(0)
    assert address is not None
    return address


def double_free(cuda: FakeCuda) -> None:
    address = synced_block(cuda)
    cuda.cudaFreeAsync(address, 0)
    cuda.cudaFreeAsync(address, 0)


def free_of_an_unknown_pointer(cuda: FakeCuda) -> None:
    cuda.cudaFreeAsync(synced_block(cuda) + 1, 0)


def use_after_free(cuda: FakeCuda) -> None:
    address = synced_block(cuda)
    cuda.cudaFreeAsync(address, 0)
    cuda.cudaMemsetAsync(address, 0, 1, 0)


def use_beyond_the_end(cuda: FakeCuda) -> None:
    cuda.cudaMemsetAsync(synced_block(cuda), 0, ALIGNMENT + 1, 0)


def use_on_a_stream_that_did_not_wait_for_the_allocation(cuda: FakeCuda) -> None:
    _, stream = cuda.cudaStreamCreate()
    _, address = cuda.cudaMallocAsync(ALIGNMENT, 0)
    assert address is not None
    cuda.cudaMemsetAsync(address, 0, 1, stream)


def free_while_another_stream_writes(cuda: FakeCuda) -> None:
    _, stream = cuda.cudaStreamCreate()
    address = synced_block(cuda)
    cuda.cudaMemsetAsync(address, 0, 1, stream)
    cuda.cudaFreeAsync(address, 0)


def free_of_pinned_memory_before_its_copy_is_done(cuda: FakeCuda) -> None:
    _, pinned = cuda.cudaMallocHost(ALIGNMENT)
    assert pinned is not None
    cuda.cudaMemcpyAsync(synced_block(cuda), pinned, 1, TO_DEVICE, 0)
    cuda.cudaFreeHost(pinned)


def reading_a_result_before_waiting(cuda: FakeCuda) -> None:
    target = np.zeros(1, np.uint8)
    cuda.cudaMemcpyAsync(target.ctypes.data, synced_block(cuda), 1, TO_HOST, 0)
    cuda.cudaGetDeviceCount()


def use_of_a_destroyed_stream(cuda: FakeCuda) -> None:
    _, stream = cuda.cudaStreamCreate()
    cuda.cudaStreamDestroy(stream)
    cuda.cudaStreamSynchronize(stream)


def destruction_of_a_stream_with_work(cuda: FakeCuda) -> None:
    _, stream = cuda.cudaStreamCreate()
    cuda.cudaMemsetAsync(synced_block(cuda), 0, 1, stream)
    cuda.cudaStreamDestroy(stream)


@pytest.mark.parametrize(
    "mistake",
    [
        double_free,
        free_of_an_unknown_pointer,
        use_after_free,
        use_beyond_the_end,
        use_on_a_stream_that_did_not_wait_for_the_allocation,
        free_while_another_stream_writes,
        free_of_pinned_memory_before_its_copy_is_done,
        reading_a_result_before_waiting,
        use_of_a_destroyed_stream,
        destruction_of_a_stream_with_work,
    ],
)
def test_the_fake_catches_and_remembers(mistake: Callable[[FakeCuda], None]) -> None:
    cuda = FakeCuda()

    with pytest.raises(Violation):
        mistake(cuda)

    assert len(cuda.violations) == 1
    with pytest.raises(AssertionError):
        cuda.check()


def test_the_fake_reports_memory_and_streams_that_nobody_gave_back() -> None:
    cuda = FakeCuda()
    synced_block(cuda)
    cuda.cudaStreamCreate()

    assert len(cuda.live_blocks()) == len(cuda.live_streams()) == 1
    with pytest.raises(AssertionError):
        cuda.check()
