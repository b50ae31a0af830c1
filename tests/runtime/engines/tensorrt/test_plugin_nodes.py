"""The LoRA plugin in contexts and graphs of an engine: its objects, its failures and its lock."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_plugins import FakePlugins
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest
from support.models.tiny_model_runs import NO_ADAPTER, bound_prompt, close, logits_of

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.plugin_failures import PluginFailures
from trt_lora.plugins.tensorrt.plugin_node import PluginNode
from trt_lora.plugins.tensorrt.plugin_registry import LoraPlugins
from trt_lora.runtime.engines.tensorrt import plan
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine

CLASSES = (
    *("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime"),
    "IPluginCreatorV3One",
)


def fake_plugins() -> LoraPlugins:
    """The plugins of a flavour without bindings."""
    kinds: dict[str, Any] = {name: type(name, (), {}) for name in CLASSES}
    fields = {"PluginField": lambda *args: args, "PluginFieldCollection": list}
    return LoraPlugins(SimpleNamespace(**kinds, **fields, PluginFieldType=SimpleNamespace(INT32=0)))


def nodes_alive() -> int:
    """How many plugin objects there are."""
    gc.collect()
    return sum(issubclass(type(found), PluginNode) for found in gc.get_objects())


def test_plugin_objects_go_with_the_contexts_of_graphs_that_are_driven_out(
    engine: TensorRTEngine, cuda: FakeCuda, trt: FakeTensorRT
) -> None:
    plugins = fake_plugins()
    trt.nodes = [plugins.make(Operator(2, has_addend=adds)) for adds in (False, True)]
    before = nodes_alive()
    with TensorRTEngine(engine.directory, engine.manifest, max_graphs=1) as small:
        maps = [bound_prompt(small), bound_prompt(small)]
        seen = set()
        for run in range(1000):
            for _ in range(2):
                logits_of(small, maps[run % 2])
            if run % 100 == 0:
                seen.add(nodes_alive())
    assert cuda.names().count("cudaStreamBeginCapture") == 1000
    assert seen == {before + 4}  # of the engine's context and of the one graph's
    del plugins, maps
    trt.nodes.clear()
    assert nodes_alive() == before - 2


# Failures, which TensorRT does not report.


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> PluginFailures:
    """What the plugin notes, and its lock."""
    plugins = FakePlugins()
    monkeypatch.setattr(plan, "register_plugins", lambda module: plugins)
    return plugins.failures


@pytest.fixture
def plugin_engine(trt: FakeTensorRT, tmp_path: Path) -> TensorRTEngine:
    """The tiny model's engine with LoRA nodes, not entered."""
    manifest = replace(small_manifest(), lora_plugin="plugin")
    return TensorRTEngine(engine_directory(tmp_path / "engine"), manifest)


def test_a_failure_of_the_plugin_fails_the_run_and_no_graph_is_kept_of_it(
    failures: PluginFailures, plugin_engine: TensorRTEngine, trt: FakeTensorRT, cuda: FakeCuda
) -> None:
    def fail_twice() -> None:
        for _ in range(2):
            failures.note("LoraAdd1: no kernel")

    with plugin_engine as engine:
        tensor_map = bound_prompt(engine)
        expected = logits_of(engine, tensor_map)
        trt.call_plugin = fail_twice
        for _ in range(2):  # the second time it comes, a run is captured
            with pytest.raises(BackendError, match=r"plugin failed: LoraAdd1: no kernel$"):
                engine.execute(tensor_map)
        trt.call_plugin = lambda: None
        cuda.calls.clear()
        assert np.array_equal(logits_of(engine, tensor_map), expected)
        assert "cudaGraphLaunch" not in cuda.names()


def test_a_plan_whose_plugin_cannot_be_made_is_refused_with_its_reason(
    failures: PluginFailures, plugin_engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    trt.call_plugin = lambda: failures.note("LoraAdd1: another release")
    trt.refusals.add("deserialize_cuda_engine")
    with pytest.raises(BackendError, match=r"plugin failed: LoraAdd1: another release$"):
        plugin_engine.__enter__()


def test_a_node_that_fails_in_a_capture_alone_fails_no_run(
    failures: PluginFailures, plugin_engine: TensorRTEngine, trt: FakeTensorRT, cuda: FakeCuda
) -> None:
    def fail_in_captures() -> None:
        if cuda.is_captured(trt.stream):
            failures.note("LoraAdd1: no kernel")

    trt.call_plugin = fail_in_captures
    with plugin_engine as engine:
        tensor_map = bound_prompt(engine)
        for _ in range(3):
            assert close(logits_of(engine, tensor_map), NO_ADAPTER)
    names = cuda.names()
    assert (names.count("cudaStreamBeginCapture"), names.count("cudaGraphLaunch")) == (2, 0)


# The lock, which a build holds for minutes.


def test_a_launch_waits_for_no_build_and_an_eager_run_does(
    failures: PluginFailures, plugin_engine: TensorRTEngine
) -> None:
    with plugin_engine as engine, ThreadPoolExecutor(1) as pool:
        repeated, other = bound_prompt(engine), bound_prompt(engine)
        for _ in range(2):
            logits_of(engine, repeated)
        with failures.collected():
            assert close(pool.submit(logits_of, engine, repeated).result(10), NO_ADAPTER)
            eager = pool.submit(logits_of, engine, other)
            with pytest.raises(TimeoutError):
                eager.result(0.1)
        assert close(eager.result(10), NO_ADAPTER)


def test_a_capture_and_its_context_have_the_lock(
    failures: PluginFailures, plugin_engine: TensorRTEngine, trt: FakeTensorRT, cuda: FakeCuda
) -> None:
    held: list[bool] = []
    trt.call_plugin = lambda: held.append(failures._lock.locked())
    node = SimpleNamespace(get_capability_interface=lambda kind: trt.call_plugin())
    node.attach_to_context, node.destroy = (lambda resources: node), (lambda: None)
    trt.nodes = [node]
    with plugin_engine as engine:
        tensor_map = bound_prompt(engine)
        for _ in range(3):
            logits_of(engine, tensor_map)
    assert held == [True] * 6  # the plan, two contexts, a run, and one before and in the capture
