"""Threads that run one engine: right answers, runs that end before it closes, memory that stays."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import TinyEngine
from hostile.stress_threads import stress
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_plugins import FakePlugins
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import UP, engine_directory, small_manifest
from support.models.tiny_model_runs import adapter, bound_prompt, close, manager_of, prompt

from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.runtime import Engine, Tensor, TensorMap, open_engine
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.memory.tensor import tensor_from_numpy

SOON = 60  # seconds, in which everything has happened that will
HELD = 0.2  # seconds, in which what is not held back would have happened


@pytest.fixture
def cpu(tiny_engine: TinyEngine) -> Iterator[Engine]:
    """The tiny engine on ONNX Runtime, open."""
    with open_engine(tiny_engine.engine, "onnxruntime") as engine:
        yield engine


def logits(outputs: Mapping[str, Tensor]) -> Any:
    return outputs["logits"].numpy()


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """Return a list that every call of a method adds its arguments to."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def method(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(owner, name, method)
    return calls


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> FakePlugins:
    """The LoRA plugin of the process, of which engines see the failures alone."""
    found = FakePlugins()
    monkeypatch.setattr(
        "trt_lora.runtime.engines.tensorrt.plan.register_plugins", lambda module: found
    )
    return found


@pytest.fixture
def during_a_run(
    trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], object]], None]:
    """Let something happen in the midst of every run, on either backend."""
    original = onnxruntime.InferenceSession.run_with_iobinding

    def arrange(happen: Callable[[], object]) -> None:
        def run(session: Any, binding: Any) -> None:
            happen()
            original(session, binding)

        trt.call_plugin = happen
        monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", run)

    return arrange


@pytest.fixture(params=["onnxruntime", "tensorrt"])
def closed_engine(
    request: pytest.FixtureRequest, tiny_engine: TinyEngine, trt: FakeTensorRT, tmp_path: Path
) -> Engine:
    """An engine that is not entered yet."""
    if request.param == "onnxruntime":
        return open_engine(tiny_engine.engine, "onnxruntime")
    return Engine(TensorRTEngine(engine_directory(tmp_path / "engine"), small_manifest()))


# On either backend.


def test_an_engine_is_entered_once_at_a_time_and_again_after_it_was_left(
    closed_engine: Engine,
) -> None:
    with closed_engine as engine:
        with pytest.raises(StateError, match="open already; make another one"):
            engine.__enter__()
        first = logits(engine.execute(bound_prompt(engine)))  # it is not disturbed
    with closed_engine as engine:
        np.testing.assert_array_equal(logits(engine.execute(bound_prompt(engine))), first)
    with pytest.raises(StateError, match="closed; use: with open_engine"):
        closed_engine.execute(TensorMap())


def test_closing_waits_for_the_run_under_way_and_refuses_later_ones(
    closed_engine: Engine, during_a_run: Callable[[Callable[[], object]], None]
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool, closed_engine as engine:
        tensor_map = bound_prompt(engine)
        expected = logits(engine.execute(tensor_map))

        def wait() -> None:
            begun.set()
            go_on.wait(SOON)

        during_a_run(wait)
        run = pool.submit(engine.execute, tensor_map)
        assert begun.wait(SOON)
        leaving = pool.submit(engine.__exit__, None, None, None)
        time.sleep(HELD)
        assert not leaving.done()
        go_on.set()
        leaving.result(SOON)
        np.testing.assert_array_equal(logits(run.result(SOON)), expected)
        with pytest.raises(StateError, match="closed"):
            engine.execute(tensor_map)


# ONNX Runtime.


def test_threads_with_a_manager_each_are_answered_as_if_alone(
    cpu: Engine, tiny_engine: TinyEngine
) -> None:
    assert stress(cpu, {"a": tiny_engine.adapter}, seconds=3) > 20


def test_runs_of_threads_go_on_at_the_same_time(
    cpu: Engine, during_a_run: Callable[[Callable[[], object]], None]
) -> None:
    maps = bound_prompt(cpu), bound_prompt(cpu)  # a run writes to the cache of its own
    expected = logits(cpu.execute(maps[0]))
    both = threading.Barrier(2)
    during_a_run(lambda: both.wait(SOON))
    with ThreadPoolExecutor(2) as pool:
        for outputs in pool.map(cpu.execute, maps):
            np.testing.assert_array_equal(logits(outputs), expected)


def test_threads_one_after_the_other_use_the_same_bindings(
    cpu: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_calls(monkeypatch, onnxruntime.InferenceSession, "io_binding")
    tensor_map = bound_prompt(cpu)
    for _ in range(10):
        thread = threading.Thread(target=cpu.execute, args=[tensor_map])
        thread.start()
        thread.join(SOON)

    assert len(made) == 1


def test_inputs_of_the_run_before_stay_bound(cpu: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, onnxruntime.IOBinding, "bind_ortvalue_input")
    tensor_map = bound_prompt(cpu)
    cpu.execute(tensor_map)
    given = [name for name in cpu.input_names if name not in cpu.manifest.lora_inputs]
    assert [name for _, name, _ in calls] == given  # dummies are not
    calls.clear()
    tensor_map["input_ids"] = tensor_from_numpy(np.array([[7, 8, 9, 10, 11]]))
    cpu.execute(tensor_map)
    assert [name for _, name, _ in calls] == ["input_ids"]


def test_an_interrupt_before_a_run_lets_the_engine_close(
    tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(session: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(onnxruntime.InferenceSession, "io_binding", interrupted)
    engine = open_engine(tiny_engine.engine, "onnxruntime").__enter__()
    with pytest.raises(KeyboardInterrupt):
        engine.execute(bound_prompt(engine))
    closing = threading.Thread(target=engine.__exit__, args=(None, None, None), daemon=True)
    closing.start()
    closing.join(SOON)
    assert not closing.is_alive()


def test_what_is_no_tensor_is_refused_by_name(cpu: Engine) -> None:
    tensor_map = bound_prompt(cpu)
    array: Any = np.array([[5]])
    for name in ("input_ids", next(iter(cpu.manifest.lora_bindings))):
        wrong = TensorMap(tensor_map)
        wrong[name] = array
        with pytest.raises(TensorError, match=rf"{name} is a ndarray, expected a Tensor"):
            cpu.execute(wrong)


def test_a_run_that_failed_leaves_nothing_bound(cpu: Engine) -> None:
    tensor_map = bound_prompt(cpu)
    expected = logits(cpu.execute(tensor_map))
    binding = next(iter(cpu.manifest.lora_bindings))
    wrong = TensorMap(tensor_map)
    wrong[binding] = tensor_from_numpy(np.ones((3, 3), np.float32))
    for _ in range(2):
        with pytest.raises(TensorError, match="refuses these inputs"):
            cpu.execute(wrong)
        np.testing.assert_array_equal(logits(cpu.execute(tensor_map)), expected)


# TensorRT.


def test_no_run_begins_before_the_other_has_ended(
    trt: FakeTensorRT, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {str(rank): adapter(rank, UP) for rank in (1, 2, 3, 4)}
    enter = cuda._enter

    def slowly(function: str, *args: Any) -> Status:
        time.sleep(0.0005)  # any other thread goes on here, if it may
        return enter(function, *args)

    with TensorRTEngine(engine_directory(tmp_path / "engine"), small_manifest()) as engine:
        maps: dict[str, TensorMap] = {}
        manager = manager_of(engine, **weights)
        for name in weights:
            manager.switch_weights(name)
            manager.refresh_tensor_map(maps.setdefault(name, prompt(engine)))
        monkeypatch.setattr(cuda, "_enter", slowly)

        def run(name: str) -> list[Tensor]:
            return [engine.execute(maps[name])["logits"] for _ in range(8)]

        with ThreadPoolExecutor(len(weights) + 1) as pool:
            warm = pool.submit(engine.warm_up)
            found = dict(zip(weights, pool.map(run, weights), strict=True))
            warm.result(SOON)
        monkeypatch.setattr(cuda, "_enter", enter)
        for name, answers in found.items():
            assert all(close(answer.numpy(), weights[name]) for answer in answers)


def test_a_run_uses_the_engines_gpu_and_the_thread_keeps_its_own(
    trt: FakeTensorRT, cuda: FakeCuda, tmp_path: Path
) -> None:
    used: list[int] = []
    cuda.devices, cuda.current_device = 2, 1
    with TensorRTEngine(engine_directory(tmp_path / "engine"), small_manifest()) as engine:
        tensor_map = bound_prompt(engine)
        trt.call_plugin = lambda: used.append(cuda.current_device)

        def run() -> int:
            engine.execute(tensor_map)
            return cuda.current_device

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(run).result(SOON) == 0

    assert used == [1]


def test_a_failure_of_the_plugin_is_that_of_the_run_in_which_it_failed(
    trt: FakeTensorRT, plugins: FakePlugins, tmp_path: Path
) -> None:
    manifest = replace(small_manifest(), lora_plugin="plugin")
    directory = engine_directory(tmp_path / "engine")
    failed, main = threading.Event(), threading.get_ident()

    def call_plugin() -> None:
        if threading.get_ident() != main:
            plugins.failures.note("LoraAdd1: no kernel")
            failed.set()
            time.sleep(HELD)  # the other engine would find it here

    with (
        TensorRTEngine(directory, manifest) as bad,
        TensorRTEngine(directory, manifest) as good,
        ThreadPoolExecutor(1) as pool,
    ):
        maps = bound_prompt(bad), bound_prompt(good)
        trt.call_plugin = call_plugin
        run = pool.submit(bad.execute, maps[0])
        assert failed.wait(SOON)
        assert good.execute(maps[1])
        with pytest.raises(BackendError, match=r"plugin failed: LoraAdd1: no kernel$"):
            run.result(SOON)


def test_a_run_that_tensorrt_refuses_leaves_no_failure_of_the_plugin_to_the_next(
    trt: FakeTensorRT, plugins: FakePlugins, tmp_path: Path
) -> None:
    manifest = replace(small_manifest(), lora_plugin="plugin")
    with TensorRTEngine(engine_directory(tmp_path / "engine"), manifest) as engine:
        tensor_map = bound_prompt(engine)

        def call_plugin() -> None:
            plugins.failures.note("LoraAdd1: no kernel")
            raise BackendError("refused")

        trt.call_plugin = call_plugin
        with pytest.raises(BackendError, match="plugin failed: LoraAdd1: no kernel"):
            engine.execute(tensor_map)
        trt.call_plugin = lambda: None
        assert engine.execute(tensor_map)
    gc.collect()  # contextlib of Python 3.13.0 leaves an exception in a circle with its frames
