"""Host tensors written to addresses of a fake GPU, of which the host does not wait for any."""

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy

CHUNK = 256


def placed(block: Tensor, arrays: dict[int, np.ndarray]) -> dict[int, Tensor]:
    """Each array at an offset of a block."""
    return {block.pointer + at: tensor_from_numpy(array) for at, array in arrays.items()}


def some_arrays() -> dict[int, np.ndarray]:
    """Arrays by offset: out of order, apart, empty, and longer than a pinned buffer."""
    sizes = {3072: 10, 0: 175, 1024: 1, 1500: 0, 2048: 64}
    return {at: np.arange(at, at + size, dtype=np.int32) + 1 for at, size in sizes.items()}


@pytest.mark.usefixtures("hurrying")
def test_every_tensor_is_where_it_should_be_and_nothing_else_is_written(cuda: FakeCuda) -> None:
    with_chunks = CudaMemory(staging_bytes=CHUNK)
    block = with_chunks.zeros(4096)
    arrays = some_arrays()
    with_chunks.write(placed(block, arrays))
    for array in arrays.values():
        array[:] = 0  # the host's may change at once
    expected = np.zeros(1024, np.int32)
    for at, array in some_arrays().items():
        expected[at // 4 : at // 4 + len(array)] = array
    np.testing.assert_array_equal(block.numpy().view(np.int32), expected)
    with_chunks.close()


def test_the_host_waits_for_no_stream(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    block = memory.zeros(4096)
    before = len(cuda.calls)
    memory.write(placed(block, some_arrays()))
    calls = cuda.names()[before:]
    assert "cudaStreamSynchronize" not in calls
    assert calls.count("cudaMemcpyAsync") == 4  # one for each that is not empty
    memory.close()


def test_pinned_memory_is_freed_once_the_device_has_read_it(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    block = memory.zeros(4096)
    memory.write(placed(block, some_arrays()))
    before = len(cuda.calls)
    memory.close()
    calls = cuda.names()[before:]
    assert calls.index("cudaEventSynchronize") < calls.index("cudaFreeHost")


def test_pinned_memory_of_a_write_that_failed_half_way_is_waited_for(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    block = memory.zeros(4096)
    before = len(cuda.calls)
    memory.write(placed(block, some_arrays()))  # makes the pinned memory
    memory.write(placed(block, some_arrays()))
    again = cuda.names()[before:]
    calls_of_one = len(again) - 1 - again[::-1].index("cudaGetDevice")
    second_copy = again.index("cudaMemcpyAsync", again.index("cudaMemcpyAsync", calls_of_one) + 1)
    cuda.fail_call(len(cuda.calls) + second_copy - calls_of_one)
    with pytest.raises(BackendError, match="cudaMemcpyAsync"):
        memory.write(placed(block, some_arrays()))
    other = {at: array * 2 for at, array in some_arrays().items()}
    memory.write(placed(block, other))
    for at, array in other.items():
        found = block.numpy().view(np.int32)[at // 4 : at // 4 + len(array)]
        np.testing.assert_array_equal(found, array)
    memory.close()


def test_the_host_writes_to_its_own_memory() -> None:
    block = HostMemory().zeros(4096)
    HostMemory().write(placed(block, some_arrays()))
    for at, array in some_arrays().items():
        found = block.numpy().view(np.int32)[at // 4 : at // 4 + len(array)]
        np.testing.assert_array_equal(found, array)
