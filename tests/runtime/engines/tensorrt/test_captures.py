"""What happens between the begin and the end of a capture, and what becomes of one that fails."""

import gc
import logging
from collections.abc import Callable, Iterator

import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.models.tiny_model_runs import NO_ADAPTER, bound_prompt, close, logits_of

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels.launcher import load_kernels
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.memory.cuda import call, uncollected
from trt_lora.runtime.memory.staging import PinnedBuffer


@pytest.fixture
def eager_collections() -> Iterator[None]:
    """Let Python collect garbage whenever anything is made."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


def in_captures(trt: FakeTensorRT, do: Callable[[], object], times: int = 99) -> None:
    """Let a plugin do something in as many captures."""
    left = [do] * times

    def called() -> None:
        if left and trt.cuda.is_captured(trt.stream):
            left.pop()()

    trt.call_plugin = called


def three_runs(engine: TensorRTEngine, cuda: FakeCuda) -> tuple[int, int]:
    """Run alone, as it is captured, and as a graph, and right; return captures and launches."""
    with engine:
        tensor_map = bound_prompt(engine)
        for _ in range(3):
            assert close(logits_of(engine, tensor_map), NO_ADAPTER)
    names = cuda.names()
    return names.count("cudaStreamBeginCapture"), names.count("cudaGraphLaunch")


# The garbage collector.


@pytest.mark.usefixtures("eager_collections")
def test_no_garbage_is_collected_in_a_capture(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    def leave_a_cycle() -> None:
        cycle: list[object] = [pinned.pop()]
        cycle.append(cycle)
        del cycle
        _ = [[] for _ in range(100)]

    pinned = [PinnedBuffer(64)]
    in_captures(trt, leave_a_cycle, times=1)
    assert three_runs(engine, cuda) == (1, 1)
    gc.collect()
    assert "cudaFreeHost" in cuda.names()


@pytest.mark.parametrize("is_on", [True, False])
def test_collections_go_on_behind_a_capture_as_they_did_before_it(is_on: bool) -> None:
    def interrupted() -> None:
        with uncollected():
            assert not gc.isenabled()
            raise KeyboardInterrupt

    try:
        (gc.enable if is_on else gc.disable)()
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_a_graph_is_on_the_gpu_before_its_first_launch(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    assert three_runs(engine, cuda) == (1, 1)
    calls = [name for name, _ in cuda.calls if name.startswith("cudaGraph")]
    assert calls[:4] == [f"cudaGraph{do}" for do in ("Instantiate", "Destroy", "Upload", "Launch")]


# Captures that fail.


def allocate_pinned_memory() -> None:
    call("cudaMallocHost", 64)


def free_pinned_memory() -> None:
    call("cudaFreeHost", 64)


def free_on_the_default_stream() -> None:
    call("cudaFreeAsync", 1 << 60, 0)


def load_a_library() -> None:
    load_kernels(b".entry one(", ["one"])


REFUSED = [allocate_pinned_memory, free_pinned_memory, free_on_the_default_stream, load_a_library]


@pytest.mark.parametrize("do", REFUSED)
def test_a_capture_that_was_invalidated_is_tried_once_more(
    engine: TensorRTEngine,
    cuda: FakeCuda,
    trt: FakeTensorRT,
    caplog: pytest.LogCaptureFixture,
    do: Callable[[], None],
) -> None:
    def refused() -> None:
        with pytest.raises(BackendError, match=r"capturing|CAPTURE_UNSUPPORTED"):
            do()

    in_captures(trt, refused, times=1)
    with caplog.at_level(logging.WARNING):
        assert three_runs(engine, cuda) == (2, 1)
    assert not caplog.messages


@pytest.mark.parametrize(
    "function",
    [
        *("cudaStreamBeginCapture", "cudaStreamEndCapture"),
        *("cudaGraphInstantiate", "cudaGraphUpload"),
    ],
)
def test_a_capture_that_fails_once_is_tried_once_more(
    engine: TensorRTEngine, cuda: FakeCuda, function: str
) -> None:
    cuda.fail(function, Status.cudaErrorMemoryAllocation)
    assert three_runs(engine, cuda) == (2, 1)


@pytest.mark.parametrize("do", REFUSED)
def test_a_capture_that_is_invalid_twice_is_given_up(
    engine: TensorRTEngine,
    cuda: FakeCuda,
    trt: FakeTensorRT,
    do: Callable[[], None],
) -> None:
    def refused() -> None:
        with pytest.raises(BackendError):
            do()

    in_captures(trt, refused)
    assert three_runs(engine, cuda) == (2, 0)
