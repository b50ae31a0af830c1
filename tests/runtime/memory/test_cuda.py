"""`runtime/memory/cuda.py` on a fake CUDA runtime, and the fake against the real one."""

import ctypes
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from support.fakes import fake_cuda_state
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import (
    ALIGNMENT,
    CaptureMode,
    CopyKind,
    Graph,
    Status,
    Stream,
    Violation,
)

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.memory.cuda import call, cuda_obstacle, on_device, synchronized, try_call

TO_DEVICE, TO_HOST = CopyKind.cudaMemcpyHostToDevice, CopyKind.cudaMemcpyDeviceToHost


# Calls, and whether there is a GPU.


def test_a_call_returns_the_one_result_or_none(cuda: FakeCuda) -> None:
    assert call("cudaGetDeviceCount") == 1
    assert call("cudaStreamSynchronize", 0) is None


def test_a_gpu_is_no_obstacle_and_only_attributes_are_asked_for(cuda: FakeCuda) -> None:
    assert not cuda_obstacle()
    assert cuda.names() == ["cudaGetDeviceCount", "cudaGetDevice", "cudaDeviceGetAttribute"]


def test_a_gpu_without_memory_pools_is_an_obstacle(cuda: FakeCuda) -> None:
    cuda.has_pools = 0
    assert "GPU 0 allocates no memory on streams (cudaMallocAsync), as virtual" in cuda_obstacle()


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


def test_an_error_is_forgotten_where_others_would_take_it_for_theirs(cuda: FakeCuda) -> None:
    cuda.fail("cudaGetDevice", Status.cudaErrorInvalidValue)
    with pytest.raises(BackendError):
        call("cudaGetDevice")

    assert cuda.last_error is Status.cudaSuccess


def test_a_stream_is_waited_for_after_a_block_and_when_the_block_raises(cuda: FakeCuda) -> None:
    with synchronized(0):
        assert not cuda.calls
    with pytest.raises(KeyboardInterrupt), synchronized(0):
        raise KeyboardInterrupt

    assert cuda.calls == [("cudaStreamSynchronize", (0,))] * 2


def test_an_error_of_a_block_is_not_hidden_by_one_of_waiting(cuda: FakeCuda) -> None:
    cuda.fail("cudaStreamSynchronize", Status.cudaErrorIllegalAddress)
    with pytest.raises(BackendError, match="of the block"), synchronized(0):
        raise BackendError("of the block")


@pytest.mark.parametrize("before", [0, 1])
def test_a_block_on_a_gpu_gives_the_thread_its_own_back_and_sets_no_more_than_it_has_to(
    cuda: FakeCuda, before: int
) -> None:
    cuda.devices, cuda.current_device = 2, before
    with suppress(KeyboardInterrupt), on_device(1):
        assert cuda.current_device == 1
        raise KeyboardInterrupt
    assert cuda.current_device == before
    sets = [] if before == 1 else [("cudaSetDevice", (1,)), ("cudaSetDevice", (0,))]
    assert cuda.calls == [("cudaGetDevice", ()), *sets]


def test_releasing_forgives_a_failed_call_but_no_broken_rule(cuda: FakeCuda) -> None:
    cuda.fail("cudaStreamDestroy", Status.cudaErrorIllegalAddress)
    try_call("cudaStreamDestroy", 1)

    with pytest.raises(Violation, match="there is no stream 1"):
        try_call("cudaStreamDestroy", 1)
    cuda.violations.clear()


# The fake: it has NVIDIA's signatures, and it catches what it says it catches.


FUNCTIONS = sorted(
    name
    for name, value in vars(FakeCuda).items()
    if name.startswith("cuda") and inspect.isfunction(value)
)


@pytest.mark.skipif(not importlib.util.find_spec("cuda"), reason="needs cuda-python")
def test_the_fake_functions_take_as_many_arguments_as_the_real_ones() -> None:
    real = importlib.import_module("cuda.bindings.runtime")

    assert {name: len(inspect.signature(getattr(real, name)).parameters) for name in FUNCTIONS} == {
        name: len(inspect.signature(getattr(FakeCuda(), name)).parameters) for name in FUNCTIONS
    }


@pytest.mark.skipif(not importlib.util.find_spec("cuda"), reason="needs cuda-python")
def test_the_fake_constants_and_texts_are_the_real_ones() -> None:
    real = importlib.import_module("cuda.bindings.runtime")

    for status in Status:
        assert int(getattr(real.cudaError_t, status.name)) == status
    for status, text in fake_cuda_state.TEXTS.items():
        assert real.cudaGetErrorString(getattr(real.cudaError_t, status.name))[1] == text
    for kind in CopyKind:
        assert int(getattr(real.cudaMemcpyKind, kind.name)) == kind
    for mode in CaptureMode:
        assert int(getattr(real.cudaStreamCaptureMode, mode.name)) == mode
    for name in ("cudaStreamNonBlocking", "cudaEventDisableTiming"):
        assert getattr(real, name) == getattr(FakeCuda, name)


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


def overwriting_pinned_memory_before_it_is_copied(cuda: FakeCuda) -> None:
    _, pinned = cuda.cudaMallocHost(ALIGNMENT)
    assert pinned is not None
    cuda.cudaMemcpyAsync(synced_block(cuda), pinned, 1, TO_DEVICE, 0)
    ctypes.memset(pinned, 7, 1)
    cuda.cudaStreamSynchronize(0)


def graph_of_a_fill(cuda: FakeCuda) -> tuple[Stream, int, Graph]:
    """Return a stream, an address, and a launchable graph that fills the memory there."""
    _, stream = cuda.cudaStreamCreateWithPriority(cuda.cudaStreamNonBlocking, 0)
    assert stream is not None
    address = synced_block(cuda)
    cuda.cudaStreamBeginCapture(stream, CaptureMode.cudaStreamCaptureModeThreadLocal)
    cuda.cudaMemsetAsync(address, 0, 1, stream)
    _, graph = cuda.cudaStreamEndCapture(stream)
    assert graph is not None
    _, launchable = cuda.cudaGraphInstantiate(graph, 0)
    assert launchable is not None
    return stream, address, launchable


def launch_of_a_graph_whose_memory_was_freed(cuda: FakeCuda) -> None:
    stream, address, graph = graph_of_a_fill(cuda)
    cuda.cudaFreeAsync(address, 0)
    cuda.cudaGraphLaunch(graph, stream)


def launch_of_a_destroyed_graph(cuda: FakeCuda) -> None:
    stream, _, graph = graph_of_a_fill(cuda)
    cuda.cudaGraphExecDestroy(graph)
    cuda.cudaGraphLaunch(graph, stream)


def destruction_of_a_running_graph(cuda: FakeCuda) -> None:
    stream, _, graph = graph_of_a_fill(cuda)
    cuda.cudaGraphLaunch(graph, stream)
    cuda.cudaGraphExecDestroy(graph)


def capture_of_the_default_stream(cuda: FakeCuda) -> None:
    cuda.cudaStreamBeginCapture(0, CaptureMode.cudaStreamCaptureModeThreadLocal)


def capture_that_others_disturb(cuda: FakeCuda) -> None:
    _, stream = cuda.cudaStreamCreateWithPriority(cuda.cudaStreamNonBlocking, 0)
    cuda.cudaStreamBeginCapture(stream, CaptureMode.cudaStreamCaptureModeGlobal)


def use_of_a_destroyed_event(cuda: FakeCuda) -> None:
    _, event = cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming)
    assert event is not None
    cuda.cudaEventDestroy(event)
    cuda.cudaEventRecord(event, 0)


def use_of_a_destroyed_stream(cuda: FakeCuda) -> None:
    _, stream = cuda.cudaStreamCreate()
    cuda.cudaStreamDestroy(stream)
    cuda.cudaStreamSynchronize(stream)


def destruction_of_a_stream_with_work(cuda: FakeCuda) -> None:
    _, stream = cuda.cudaStreamCreate()
    cuda.cudaMemsetAsync(synced_block(cuda), 0, 1, stream)
    cuda.cudaStreamDestroy(stream)


def of_two_gpus(cuda: FakeCuda) -> int:
    """Return the address of memory of GPU 0, while GPU 1 is current."""
    address, cuda.devices, cuda.current_device = synced_block(cuda), 2, 1
    return address


def use_of_memory_on_the_default_stream_of_another_gpu(cuda: FakeCuda) -> None:
    cuda.cudaMemsetAsync(of_two_gpus(cuda), 0, 1, 0)


def free_on_the_default_stream_of_another_gpu(cuda: FakeCuda) -> None:
    cuda.cudaFreeAsync(of_two_gpus(cuda), 0)


def event_on_a_stream_of_another_gpu(cuda: FakeCuda) -> None:
    _, event = cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming)
    assert event is not None
    of_two_gpus(cuda)
    cuda.cudaEventRecord(event, 0)


@pytest.mark.parametrize(
    "mistake",
    [
        use_of_memory_on_the_default_stream_of_another_gpu,
        free_on_the_default_stream_of_another_gpu,
        event_on_a_stream_of_another_gpu,
        double_free,
        free_of_an_unknown_pointer,
        use_after_free,
        use_beyond_the_end,
        use_on_a_stream_that_did_not_wait_for_the_allocation,
        free_while_another_stream_writes,
        free_of_pinned_memory_before_its_copy_is_done,
        reading_a_result_before_waiting,
        overwriting_pinned_memory_before_it_is_copied,
        launch_of_a_graph_whose_memory_was_freed,
        launch_of_a_destroyed_graph,
        destruction_of_a_running_graph,
        capture_of_the_default_stream,
        capture_that_others_disturb,
        use_of_a_destroyed_event,
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


def test_the_fake_does_captured_work_when_it_is_launched_and_not_before() -> None:
    cuda = FakeCuda()
    stream, address, graph = graph_of_a_fill(cuda)
    cuda.cudaStreamSynchronize(stream)
    assert cuda.view(address, 1)[0] == fake_cuda_state.GARBAGE

    for _ in range(2):
        cuda.view(address, 1)[0] = 1
        cuda.cudaGraphLaunch(graph, stream)
        assert cuda.view(address, 1)[0] == 1
        cuda.cudaStreamSynchronize(stream)
        assert cuda.view(address, 1)[0] == 0


def test_waiting_in_a_capture_makes_the_fake_end_it_with_an_error() -> None:
    cuda = FakeCuda()
    _, stream = cuda.cudaStreamCreateWithPriority(cuda.cudaStreamNonBlocking, 0)
    cuda.cudaStreamBeginCapture(stream, CaptureMode.cudaStreamCaptureModeThreadLocal)

    assert cuda.cudaStreamSynchronize(stream)[0] is Status.cudaErrorStreamCaptureUnsupported
    assert cuda.cudaStreamEndCapture(stream)[0] is Status.cudaErrorStreamCaptureInvalidated
    assert cuda.cudaStreamSynchronize(stream)[0] is Status.cudaSuccess


@pytest.mark.parametrize("handle", ["event", "graph"])
def test_the_fake_reports_events_and_graphs_that_nobody_destroyed(handle: str) -> None:
    cuda = FakeCuda()
    if handle == "event":
        cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming)
    else:
        stream, address, _ = graph_of_a_fill(cuda)
        cuda.cudaFreeAsync(address, 0)
        cuda.cudaStreamDestroy(stream)

    with pytest.raises(AssertionError):
        cuda.check()


def test_the_fake_reports_memory_and_streams_that_nobody_gave_back() -> None:
    cuda = FakeCuda()
    synced_block(cuda)
    cuda.cudaStreamCreate()

    assert len(cuda.live_blocks()) == len(cuda.live_streams()) == 1
    with pytest.raises(AssertionError):
        cuda.check()
