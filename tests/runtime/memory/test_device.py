"""`runtime/memory/device.py` and `staging.py` on a fake CUDA runtime."""

import ctypes
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.fakes import fake_cuda
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import ALIGNMENT, CopyKind, Status, Work

from trt_lora.plugins.errors import BackendError, ConfigError, TensorError
from trt_lora.runtime.memory.cuda import call
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.host import Memory, pack
from trt_lora.runtime.memory.staging import Piece, pieces_of
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy, tensor_from_storage

TO_DEVICE = CopyKind.cudaMemcpyHostToDevice
OUTPUTS = {"x": Tensor(0, (65,), "float32"), "y": Tensor(0, (2, 3), "int64")}


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
    tensors = CudaMemory().empty(OUTPUTS)

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

    names = ["cudaGetDevice", "cudaMemcpyAsync", "cudaStreamSynchronize"]
    assert cuda.names()[before:] == names


def test_memory_of_a_gpu_is_named_by_its_number(cuda: FakeCuda) -> None:
    cuda.devices = 4
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
        from support.fakes import fake_cuda
        cuda = fake_cuda.FakeCuda()
        atexit.register(lambda: print("left:", cuda.live_blocks(), cuda.violations))
        sys.modules["cuda.bindings.runtime"] = cuda
        from trt_lora.runtime.memory.device import CudaMemory
        tensor = CudaMemory().zeros(8)
        print("held:", len(cuda.live_blocks()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(fake_cuda.__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["held: 1", "left: [] []"]
    assert not done.stderr


# One range, in chunks.


def packed_tensors(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return tensors of random bytes that lie in one host buffer, as those of an adapter do."""
    empty = {name: Tensor(0, (size,), "bool") for name, size in sizes.items()}
    nbytes, layout = pack(empty, "cpu")
    buffer = np.random.default_rng(0).integers(0, 2, nbytes + 1).astype(np.bool_)[1:]
    return {
        name: Tensor(place.pointer + buffer.ctypes.data, place.shape, "bool", "cpu", buffer)
        for name, place in layout.items()
    }


def test_tensors_packed_in_one_buffer_are_one_piece_wherever_it_lies() -> None:
    tensors = packed_tensors({"a": 100, "empty": 0, "b": 256, "c": 3})

    (piece,) = pieces_of(tensors, pack(tensors, "cuda:0")[1])

    assert piece == Piece(0, tensors["a"].pointer, 256 + 256 + 3)


def test_tensors_in_another_order_or_of_another_owner_are_pieces_of_their_own() -> None:
    tensors = packed_tensors({"a": 100, "b": 100, "c": 100})
    turned = {name: tensors[name] for name in ("b", "a", "c")}
    others = tensors | {"b": Tensor(tensors["b"].pointer, (100,), "bool", "cpu", object())}

    assert len(pieces_of(turned, pack(turned, "cuda:0")[1])) == 3
    assert len(pieces_of(others, pack(others, "cuda:0")[1])) == 3


@pytest.mark.parametrize("packed", [True, False])
def test_a_large_upload_passes_through_two_small_pinned_buffers(
    cuda: FakeCuda, packed: bool
) -> None:
    tensors = packed_tensors({"a": 1000, "b": 5, "c": 4000, "d": 1})
    if not packed:
        tensors = {n: tensor_from_numpy(t.numpy().copy()) for n, t in tensors.items()}
    values = {name: tensor.numpy().copy() for name, tensor in tensors.items()}

    memory = CudaMemory(staging_bytes=512)
    uploaded = memory.upload(tensors)

    end = uploaded["d"].pointer + 1 - uploaded["a"].pointer
    assert len(cuda.copies) == -(-end // 512)
    assert all(copy.source_is_pinned and copy.nbytes <= 512 for copy in cuda.copies)
    assert len({copy.source for copy in cuda.copies}) == 2
    for name, value in values.items():
        np.testing.assert_array_equal(uploaded[name].numpy(), value)


def test_an_upload_copies_a_packed_adapter_once_on_the_host(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    move = ctypes.memmove

    def counted(target: int, source: int, count: int) -> int:
        copied.append(count)
        return move(target, source, count)

    monkeypatch.setattr(ctypes, "memmove", counted)
    CudaMemory().upload(packed_tensors({"a": 100, "b": 256, "c": 3}))

    assert copied == [256 + 256 + 3]


def test_the_host_memory_of_an_upload_may_change_when_it_returns(cuda: FakeCuda) -> None:
    array = np.arange(1000)
    tensor = CudaMemory().upload({"x": tensor_from_numpy(array)})["x"]
    array[:] = 0

    np.testing.assert_array_equal(tensor.numpy(), np.arange(1000))


def test_staged_tensors_are_copied_on_the_stream_and_not_waited_for(cuda: FakeCuda) -> None:
    memory, stream = CudaMemory(), int(call("cudaStreamCreate"))
    memory.stage(host_tensors(), stream)  # the first time, it allocates
    call("cudaStreamSynchronize", stream)
    before = len(cuda.calls)

    tensors = memory.stage(host_tensors(), stream)

    names = ["cudaEventSynchronize", "cudaMemcpyAsync", "cudaEventRecord"]
    assert cuda.names()[before:] == names
    call("cudaStreamSynchronize", stream)
    call("cudaStreamDestroy", stream)
    for name, array in arrays().items():
        np.testing.assert_array_equal(tensors[name].numpy(), array)


def test_a_second_staging_waits_until_the_first_has_left_the_pinned_buffer(cuda: FakeCuda) -> None:
    memory, stream = CudaMemory(), int(call("cudaStreamCreate"))
    first = memory.stage({"x": tensor_from_numpy(np.ones(8, np.int64))}, stream)["x"]
    second = memory.stage({"x": tensor_from_numpy(np.zeros(8, np.int64))}, stream)["x"]
    call("cudaStreamSynchronize", stream)
    call("cudaStreamDestroy", stream)

    assert first.numpy().all()
    assert not second.numpy().any()


# Memory of steps, and the end.


def test_memory_of_a_step_is_used_again_by_the_next(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    pointers = {memory.empty({"x": Tensor(0, (65,), "float32")})["x"].pointer for _ in range(3)}

    assert len(pointers) == 1
    assert cuda.names().count("cudaMallocAsync") == 1


def test_memory_of_a_step_is_not_used_again_while_a_tensor_lies_in_it(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    kept, other = memory.empty(OUTPUTS)["y"], memory.empty(OUTPUTS)["y"]

    assert kept.pointer != other.pointer


def test_adapters_do_not_stay_in_the_pool(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    tensors = memory.upload(host_tensors())
    before = len(cuda.live_blocks())

    tensors.clear()

    assert len(cuda.live_blocks()) == before - 1


def test_closing_gives_everything_back_but_what_tensors_lie_in(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    adapter = memory.upload(host_tensors())
    output = memory.empty({"x": Tensor(0, (65,), "float32")})
    del memory.empty({"x": Tensor(0, (650,), "float32")})["x"]
    memory.close()
    assert len(cuda.live_blocks()) == 2
    np.testing.assert_array_equal(adapter["b"].numpy(), arrays()["b"])

    adapter.clear()
    output.clear()
    assert not cuda.live_blocks()
    assert not cuda.live_handles()


def test_memory_may_be_uploaded_to_after_it_was_closed(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    memory.close()
    tensor = memory.upload(host_tensors())["b"]

    np.testing.assert_array_equal(tensor.numpy(), arrays()["b"])


@pytest.mark.parametrize(("kept", "staging_bytes"), [(-1, 4096), (0, 255)])
def test_sizes_that_cannot_work_are_refused(kept: int, staging_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"is (-1|255), expected a whole number (0|256) or more"):
        CudaMemory(max_free_bytes=kept, staging_bytes=staging_bytes)
