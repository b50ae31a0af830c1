"""Opening and closing a TensorRT engine: nothing is left, whatever fails."""

import gc
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from support.fakes import fake_tensorrt
from support.fakes.fake_cuda import HIGHEST_PRIORITY, FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest
from support.models.tiny_model_runs import (
    FIRST,
    IDS,
    NO_ADAPTER,
    bound_prompt,
    close,
    logits_of,
    manager_of,
    prompt,
    step,
)

from trt_lora.plugins.errors import BackendError, StateError
from trt_lora.runtime import TensorMap
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.engines.tensorrt.plan import _mapped
from trt_lora.runtime.manifest import PLAN_FILE

# Lifetimes.


def test_an_engine_that_is_open_is_not_opened_again(engine: TensorRTEngine) -> None:
    with engine, pytest.raises(StateError, match="open already"):
        engine.__enter__()


def session(engine: TensorRTEngine) -> None:
    """All that an engine does: open, load, warm up, run as a graph, switch, decode, close."""
    with engine:
        engine.warm_up()
        manager, tensor_map = manager_of(engine, a=FIRST), prompt(engine)
        for name in ("", "a", "a", "a"):
            manager.switch_weights(name) if name else manager.reset_weights()
            manager.refresh_tensor_map(tensor_map)
            outputs = engine.execute(tensor_map)
            assert close(outputs["logits"].numpy(), FIRST if name else NO_ADAPTER)
        tensor_map.update(step(IDS[:1], len(IDS)))
        engine.execute(tensor_map)


def test_a_session_frees_as_much_as_it_allocates(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    session(engine)

    names = cuda.names()
    for make, give_back in (
        ("cudaMallocAsync", "cudaFreeAsync"),
        ("cudaMallocHost", "cudaFreeHost"),
        ("cudaEventCreateWithFlags", "cudaEventDestroy"),
        ("cudaStreamCreateWithPriority", "cudaStreamDestroy"),
        ("cudaStreamEndCapture", "cudaGraphDestroy"),
        ("cudaGraphInstantiate", "cudaGraphExecDestroy"),
    ):
        assert names.count(make) == names.count(give_back) > 0


def test_whichever_call_fails_nothing_is_left_and_no_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = succeeded = 0
    directory, index, done = engine_directory(tmp_path / "engine"), 0, False
    while not done:
        cuda = FakeCuda()
        cuda.install(monkeypatch)
        trt = FakeTensorRT(cuda)
        trt.install(monkeypatch)
        cuda.fail_call(index)
        try:
            session(TensorRTEngine(directory, small_manifest()))
            succeeded += 1
        except BackendError:
            failed += 1
        done = index >= len(cuda.calls)
        name = cuda.names()[min(index, len(cuda.calls) - 1)]
        if "Free" not in name and "Destroy" not in name:  # what could not be freed is still there
            cuda.check()
            assert not list(trt.contexts)
        index += 1

    assert failed > 40
    assert succeeded > 5  # without a graph, or with what could not be freed


def test_outputs_outlive_the_engine_and_are_freed_when_released(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        outputs = engine.execute(bound_prompt(engine))

    assert len(cuda.live_blocks()) == 2  # logits and the cache
    assert close(outputs["logits"].numpy(), NO_ADAPTER)
    del outputs
    assert not cuda.live_blocks()


def test_repeated_runs_allocate_no_more_than_one(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        sizes = []
        for _ in range(3):
            outputs = engine.execute(tensor_map)
            sizes.append(len(cuda.live_blocks()))
            del outputs

    assert sizes == [6, 6, 6]  # activations, zeros, tokens, cache, logits; pinned memory


def test_leaving_with_gives_back_context_and_stream_but_keeps_the_adapters(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        manager = manager_of(engine, a=FIRST)
        assert len(list(trt.contexts)) == len(cuda.live_streams()) == 1

    assert not list(trt.contexts)
    assert not cuda.live_streams()
    manager.switch_weights("a")
    for name, values in FIRST.items():
        np.testing.assert_array_equal(manager.get_active_weight(name).numpy(), values)


def test_an_interrupted_run_is_waited_for_before_its_memory_is_freed(
    engine: TensorRTEngine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake_tensorrt.IExecutionContext.execute_async_v3

    def interrupted(self: fake_tensorrt.IExecutionContext, stream_handle: int) -> bool:
        start(self, stream_handle)
        raise KeyboardInterrupt

    with engine:
        tensor_map = bound_prompt(engine)
        with monkeypatch.context() as patch:
            patch.setattr(fake_tensorrt.IExecutionContext, "execute_async_v3", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.execute(tensor_map)

        engine.memory.close()
        assert len(cuda.live_blocks()) == 3  # activations, zeros and the cache
        assert close(logits_of(engine, tensor_map), NO_ADAPTER)


def test_a_run_in_a_cycle_is_waited_for_before_its_memory_is_freed(engine: TensorRTEngine) -> None:
    """A collection ends the run and its memory together, in any order."""
    with engine:
        run = engine.prepare_topk(bound_prompt(engine), logits="logits", fed="input_ids")
        run.enqueue()
        vars(run)["cycle"] = run
        del run
        gc.collect()


def test_candidates_of_logits_are_searched_on_the_stream_of_their_temperatures(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with engine:
        logits = engine.execute(bound_prompt(engine))["logits"]
        engine.topk(logits, np.ones(logits.shape[0]))
    assert {launch.stream for launch in trt.driver.launched} == {trt.stream}


def test_the_streams_beside_the_own_one_are_ours_urgent_and_the_same_in_every_context(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    trt.aux_streams = 2
    with engine:
        tensor_map = bound_prompt(engine)
        for _ in range(3):  # plain, captured, launched
            assert close(logits_of(engine, tensor_map), NO_ADAPTER)
        made = [args for name, args in cuda.calls if name == "cudaStreamCreateWithPriority"]
        assert made == [(cuda.cudaStreamNonBlocking, HIGHEST_PRIORITY)] * 2 + [(1, 0)]
        assert len(list(trt.contexts)) == 2
        assert {tuple(context.aux_streams) for context in trt.contexts} == {
            (*cuda.live_streams()[:2],)
        }
    assert not cuda.live_streams()


def test_a_plan_is_mapped_while_it_is_loaded_and_no_longer(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    with engine:
        assert isinstance(trt.plan, mmap.mmap)
        assert trt.plan.closed


def test_tensorrt_takes_a_plan_that_is_mapped(tmp_path: Path) -> None:
    rtx = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    (tmp_path / PLAN_FILE).write_bytes(b"no plan, as the library itself says" * 100)
    runtime = rtx.Runtime(rtx.Logger(rtx.Logger.INTERNAL_ERROR))
    with _mapped(tmp_path / PLAN_FILE) as plan:
        assert runtime.deserialize_cuda_engine(plan) is None


# Errors on the way in.


def test_a_plan_that_is_refused_says_what_built_it_and_leaves_nothing_open(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    (engine.directory / PLAN_FILE).write_bytes(b"a plan of another version")

    with pytest.raises(BackendError, match=r"tensorrt-rtx refuses .*'1\.7'.*build it on this"):
        engine.__enter__()

    assert not cuda.live_streams()


def test_a_plan_that_is_refused_on_a_gpu_that_the_library_does_not_support_says_so(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    trt.supports("8.6", "12.0")
    trt.refusals.add("deserialize_cuda_engine")

    with pytest.raises(BackendError, match=r"compute capability 8\.6, 12\.0.* has 9\.0") as caught:
        engine.__enter__()
    assert "pip install 'trt-lora[tensorrt]'" in str(caught.value)
    assert "on this machine" not in str(caught.value)


@pytest.mark.parametrize("method", ["deserialize_cuda_engine", "create_execution_context"])
def test_an_engine_that_cannot_be_loaded_stays_closed_and_can_be_tried_again(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT, method: str
) -> None:
    trt.refusals.add(method)
    with pytest.raises(BackendError), engine:
        pytest.fail("the engine is open")
    with pytest.raises(StateError, match="closed"):
        engine.execute(TensorMap())
    assert not cuda.live_streams()
    assert not list(trt.contexts)

    trt.refusals.clear()
    with engine:
        assert close(logits_of(engine, bound_prompt(engine)), NO_ADAPTER)


@pytest.mark.parametrize(
    "function", ["cudaGetDevice", "cudaMallocAsync", "cudaStreamCreateWithPriority"]
)
def test_an_engine_without_a_stream_stays_closed_and_keeps_no_context(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT, function: str
) -> None:
    cuda.fail(function, Status.cudaErrorMemoryAllocation)
    with pytest.raises(BackendError, match=f"{function}: out of memory"), engine:
        pytest.fail("the engine is open")
    with pytest.raises(StateError, match="closed"):
        engine.execute(TensorMap())

    assert not list(trt.contexts)


def test_a_library_that_is_missing_is_named_with_the_way_to_install_it(
    engine: TensorRTEngine, trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, trt.__name__, None)

    with pytest.raises(BackendError, match=r"tensorrt-rtx cannot be imported.*trt-lora\[rtx\]"):
        engine.__enter__()
