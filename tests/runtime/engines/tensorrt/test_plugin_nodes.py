"""What contexts and graphs of an engine take of the LoRA plugin: its objects, and its lock."""

import gc
from types import SimpleNamespace
from typing import Any

from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.models.tiny_model_runs import bound_prompt, logits_of

from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.tensorrt.plugin_node import PluginNode
from trt_lora.plugins.tensorrt.plugin_registry import LoraPlugins
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
    return sum(isinstance(found, PluginNode) for found in gc.get_objects())


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
