"""Captured runs of an engine on a fake TensorRT and a fake CUDA."""

import logging
from collections.abc import Callable

import pytest
from support.fakes import fake_tensorrt
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.fake_tensorrt_config import SpecializationStrategy
from support.fakes.tiny_engine import engine_directory, small_manifest
from support.models.tiny_model_runs import (
    FIRST,
    IDS,
    NO_ADAPTER,
    SECOND,
    bound_prompt,
    close,
    logits_of,
    manager_of,
    prompt,
    step,
)

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime import TensorMap
from trt_lora.runtime.engines.tensorrt import run_key
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy


def launches(cuda: FakeCuda) -> int:
    """How many runs were launched as graphs."""
    return cuda.names().count("cudaGraphLaunch")


def captures(cuda: FakeCuda) -> int:
    """How many captures were begun."""
    return cuda.names().count("cudaStreamBeginCapture")


def with_graphs(engine: TensorRTEngine, max_graphs: int) -> TensorRTEngine:
    """The same engine with room for so many graphs."""
    return TensorRTEngine(engine.directory, engine.manifest, max_graphs=max_graphs)


def generation(engine: TensorRTEngine, tensor_map: TensorMap) -> list[Array]:
    """Logits of a prompt and three tokens after it."""
    found = []
    for ids, length in ((IDS[:2], 0), *((IDS[i : i + 1], i) for i in (2, 3, 4))):
        tensor_map.update(step(ids, length))
        found.append(logits_of(engine, tensor_map))
    return found


# What is captured, and that it answers right.


def test_a_run_is_captured_when_it_comes_again_and_launched_from_then_on(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    seen = []
    with engine:
        tensor_map = bound_prompt(engine)
        for _ in range(4):
            assert close(logits_of(engine, tensor_map), NO_ADAPTER)
            seen.append((captures(cuda), launches(cuda)))

    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert len(trt.profiles) == 3  # one plain run, then one before the capture and one in it


def test_a_launch_touches_no_context_and_copies_the_tokens_alone(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        for _ in range(2):
            engine.execute(tensor_map)
        trt.bound.clear()
        before = len(cuda.calls)
        engine.execute(tensor_map)

        assert cuda.names()[before:] == [
            "cudaGetDevice",
            "cudaEventRecord",
            "cudaStreamWaitEvent",
            "cudaEventSynchronize",
            "cudaMemcpyAsync",
            "cudaEventRecord",
            "cudaGraphLaunch",
            "cudaStreamSynchronize",
        ]
        assert not trt.bound


def test_a_graph_reads_what_its_inputs_hold_now(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        for shift in range(4):
            ids = (IDS + shift) % 11
            tensor_map["input_ids"] = tensor_from_numpy(ids[None])
            assert close(logits_of(engine, tensor_map), NO_ADAPTER, ids)

    assert launches(cuda) == 2


def test_a_generation_like_two_before_is_all_launches(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        manager, tensor_map = manager_of(engine, a=FIRST), prompt(engine)
        manager.switch_weights("a")
        manager.refresh_tensor_map(tensor_map)
        first, second = (generation(engine, tensor_map) for _ in range(2))
        assert (captures(cuda), launches(cuda)) == (4, 0)
        third = generation(engine, tensor_map)

    assert launches(cuda) == 4
    for steps in (first, second, third):
        for taken, logits in enumerate(steps):
            assert close(logits, FIRST, IDS[: 2 + taken])


@pytest.mark.parametrize("alike", [False, True], ids=["as they are", "with one digest"])
def test_every_adapter_has_graphs_of_its_own(
    engine: TensorRTEngine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    if alike:
        monkeypatch.setattr(run_key, "hash", lambda _: 7, raising=False)
    same_shapes = {name: array * 2 for name, array in FIRST.items()}
    weights = {"a": FIRST, "b": same_shapes, "": NO_ADAPTER}
    with engine:
        manager, tensor_map = manager_of(engine, a=FIRST, b=same_shapes), prompt(engine)
        for name in ["a", "b", "", "a", "b", "", "b", "", "a"]:
            manager.switch_weights(name) if name else manager.reset_weights()
            manager.refresh_tensor_map(tensor_map)
            assert close(logits_of(engine, tensor_map), weights[name])

    assert (captures(cuda), launches(cuda)) == (3, 3)


def test_an_adapter_at_another_address_never_meets_the_graph_of_one_that_is_gone(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        for strength in (1, 2, 3):
            weights = {name: array * strength for name, array in FIRST.items()}
            manager, tensor_map = manager_of(engine, a=weights), prompt(engine)
            manager.switch_weights("a")
            for _ in range(3):
                manager.refresh_tensor_map(tensor_map)
                assert close(logits_of(engine, tensor_map), weights)
            del manager, tensor_map

    assert launches(cuda) == 3


def test_outputs_that_are_kept_are_not_overwritten_by_a_launch(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with engine:
        tensor_map = bound_prompt(engine)
        engine.execute(tensor_map)
        kept = [engine.execute(tensor_map) for _ in range(3)]
        tensor_map["input_ids"] = tensor_from_numpy(IDS[None, ::-1].copy())
        engine.execute(tensor_map)

        assert all(close(outputs["logits"].numpy(), NO_ADAPTER) for outputs in kept)


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx"])
def test_both_flavours_capture(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
) -> None:
    FakeTensorRT(cuda, name).install(monkeypatch)
    manifest = small_manifest(flavour=name.replace("_", "-"))
    directory = engine_directory(tmp_path_factory.mktemp("engines") / "engine", manifest)
    with TensorRTEngine(directory, manifest) as engine:
        tensor_map = bound_prompt(engine)
        for _ in range(3):
            assert close(logits_of(engine, tensor_map), NO_ADAPTER)

    assert launches(cuda) == 1


def test_a_context_of_a_graph_compiles_its_kernels_before_the_capture(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    kinds = SpecializationStrategy
    with engine:
        tensor_map = bound_prompt(engine)
        for _ in range(2):
            engine.execute(tensor_map)
        strategies = [c.config.dynamic_shapes_kernel_specialization_strategy for c in trt.contexts]

        assert sorted(strategies) == [kinds.LAZY, kinds.EAGER]


# How many there are.


def test_without_room_nothing_is_captured(plain: TensorRTEngine, cuda: FakeCuda) -> None:
    with plain as engine:
        tensor_map = bound_prompt(engine)
        for _ in range(3):
            engine.execute(tensor_map)

    assert captures(cuda) == 0


def test_the_graph_launched_longest_ago_is_driven_out_with_its_context(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with with_graphs(engine, 2) as few:
        manager = manager_of(few, a=FIRST, b=SECOND)
        maps = {}
        for name in ("a", "b", ""):
            manager.switch_weights(name) if name else manager.reset_weights()
            maps[name] = prompt(few)
            manager.refresh_tensor_map(maps[name])
        for name in ("a", "a", "b", "b", "a", "", ""):  # b was launched longest ago
            few.execute(maps[name])
        assert len(trt.contexts) == 3
        assert sum(graph.launchable for graph in cuda.graphs if not graph.destroyed) == 2
        before = launches(cuda)
        few.execute(maps["a"])
        few.execute(maps[""])
        assert launches(cuda) == before + 2

        assert close(logits_of(few, maps["b"]), SECOND)
        assert launches(cuda) == before + 2


def test_runs_that_repeat_after_more_than_there_is_room_for_are_not_captured(
    engine: TensorRTEngine, cuda: FakeCuda
) -> None:
    with with_graphs(engine, 3) as few:
        manager, tensor_map = manager_of(few), prompt(few)
        manager.refresh_tensor_map(tensor_map)
        for _ in range(4):
            generation(few, tensor_map)  # of four runs

    assert captures(cuda) == 0


def test_a_number_of_graphs_below_zero_is_refused(engine: TensorRTEngine) -> None:
    with pytest.raises(ConfigError, match="max_graphs is -1, expected a whole number 0 or more"):
        with_graphs(engine, -1)


# What cannot be captured.


def wait_in_a_plugin(cuda: FakeCuda, trt: FakeTensorRT) -> None:
    trt.plugin_waits = True


def refuse_to_be_captured(cuda: FakeCuda, trt: FakeTensorRT) -> None:
    trt.capturable = False


def have_no_memory_for_a_context(cuda: FakeCuda, trt: FakeTensorRT) -> None:
    trt.refusals.add("create_execution_context")


OBSTACLES = [wait_in_a_plugin, refuse_to_be_captured, have_no_memory_for_a_context]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_run_that_cannot_be_captured_goes_on_without_and_is_not_tried_again(
    engine: TensorRTEngine,
    cuda: FakeCuda,
    trt: FakeTensorRT,
    caplog: pytest.LogCaptureFixture,
    obstacle: Callable[[FakeCuda, FakeTensorRT], None],
) -> None:
    with engine, caplog.at_level(logging.WARNING):
        tensor_map = bound_prompt(engine)
        assert close(logits_of(engine, tensor_map), NO_ADAPTER)
        obstacle(cuda, trt)
        assert close(logits_of(engine, tensor_map), NO_ADAPTER)
        tried = captures(cuda), len(trt.profiles)
        for _ in range(2):
            assert close(logits_of(engine, tensor_map), NO_ADAPTER)

        assert (captures(cuda), len(trt.profiles)) == (tried[0], tried[1] + 2)
        assert len(trt.contexts) == 1
    assert launches(cuda) == 0
    assert len(caplog.messages) == 1
    assert "runs go on without a CUDA graph" in caplog.messages[0]


def test_an_engine_whose_first_captures_all_fail_is_not_captured_any_more_and_says_so_once(
    engine: TensorRTEngine,
    cuda: FakeCuda,
    trt: FakeTensorRT,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trt.plugin_waits = True
    with engine, caplog.at_level(logging.WARNING):
        manager, tensor_map = manager_of(engine), prompt(engine)
        manager.refresh_tensor_map(tensor_map)
        for _ in range(3):
            for taken, logits in enumerate(generation(engine, tensor_map)):
                assert close(logits, NO_ADAPTER, IDS[: 2 + taken])

    assert captures(cuda) == 3 * 2
    assert len(caplog.messages) == 1


def test_one_failure_among_successes_stops_no_other_capture(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    with engine:
        manager, tensor_map = manager_of(engine), prompt(engine)
        manager.refresh_tensor_map(tensor_map)
        generation(engine, tensor_map)
        trt.plugin_waits = True
        tensor_map.update(step(IDS[:2], 0))
        engine.execute(tensor_map)
        trt.plugin_waits = False
        for _ in range(2):
            generation(engine, tensor_map)

    assert (captures(cuda), launches(cuda)) == (2 + 3, 3)


def test_an_interrupted_capture_leaves_the_stream_usable(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake_tensorrt.IExecutionContext.execute_async_v3

    def interrupted(self: fake_tensorrt.IExecutionContext, stream_handle: int) -> bool:
        started = start(self, stream_handle)
        if cuda.is_captured(stream_handle):
            raise KeyboardInterrupt
        return started

    with engine:
        tensor_map = bound_prompt(engine)
        engine.execute(tensor_map)
        with monkeypatch.context() as patch:
            patch.setattr(fake_tensorrt.IExecutionContext, "execute_async_v3", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.execute(tensor_map)

        assert len(trt.contexts) == 1
        for _ in range(3):
            assert close(logits_of(engine, tensor_map), NO_ADAPTER)
    assert launches(cuda) == 1


def test_a_device_lost_in_a_capture_is_an_error(engine: TensorRTEngine, cuda: FakeCuda) -> None:
    def run() -> None:
        with engine:
            tensor_map = bound_prompt(engine)
            engine.execute(tensor_map)
            cuda.lose_device_at("cudaStreamBeginCapture")
            engine.execute(tensor_map)

    with pytest.raises(BackendError, match="an illegal memory access"):
        run()
