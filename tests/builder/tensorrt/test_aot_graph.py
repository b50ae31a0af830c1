"""The copy of a graph that full TensorRT parses for ahead-of-time plugins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
from conftest import TinyEngine
from support.fakes.fake_cuda import FakeCuda
from support.models.tiny_models import tiny_config

from trt_lora.builder import build_engine
from trt_lora.builder.tensorrt import aot_graph as aot_plugin
from trt_lora.builder.tensorrt.aot_graph import check_plugin_layers, largest_groups, use_aot_plugins
from trt_lora.plugins.contract.operators import DOMAIN
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.runtime import read_manifest
from trt_lora.runtime.manifest import ONNX_FILE

CHIP = Chip((9, 0), 132)


@pytest.fixture
def model(tiny_engine: TinyEngine) -> ir.Model:
    return ir.load(tiny_engine.engine / ONNX_FILE)


def attributes(model: ir.Model) -> list[dict[str, Any]]:
    return [
        {name: attribute.value for name, attribute in node.attributes.items()}
        for node in model.graph
        if node.domain == DOMAIN
    ]


def test_every_node_asks_for_the_plugin_at_its_largest_shapes(
    tiny_engine: TinyEngine, model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(aot_plugin, "register_aot_plugins", lambda *args: calls.append(args))
    monkeypatch.setattr(aot_plugin, "chip_of", {0: Chip((8, 0), 108), 1: CHIP}.__getitem__)
    cuda = FakeCuda(devices=2)
    cuda.install(monkeypatch)
    cuda.current_device = 1
    profiles = read_manifest(tiny_engine.engine).profiles
    assert attributes(model) == [{}, {}]
    use_aot_plugins("tensorrt", model, profiles)
    # A prompt of 32 tokens in a batch of 2; q [32, 32] and v [32, 16] of two layers; rank 16.
    group = GroupShape(64, 32, (SiteShape(32, 16), SiteShape(16, 16)), "float32", has_addend=False)
    assert calls == [("tensorrt", [group, group], CHIP)]
    assert attributes(model) == [{"plugin_namespace": "trt_lora", "aot": 1}] * 2
    assert largest_groups(model, profiles) == [group, group]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_node_that_the_parser_has_inlined_is_an_error(count: int, model: ir.Model) -> None:
    trt: Any = SimpleNamespace(LayerType=SimpleNamespace(PLUGIN_V3="plugin"))
    layers = [SimpleNamespace(type=kind) for kind in ("plugin",) * count + ("other",)]
    network: Any = SimpleNamespace(num_layers=len(layers), get_layer=layers.__getitem__)
    with pytest.raises(ModelError, match=rf"made {count} plugin layers of 2 LoRA nodes"):
        check_plugin_layers(trt, network, model)
    layers[:] = [SimpleNamespace(type="plugin")] * 2
    network.num_layers = 2
    check_plugin_layers(trt, network, model)


def test_tensorrt_rtx_has_no_such_plugins(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    config = tiny_config(
        tiny_engine.model, tmp_path / "e", flavour="tensorrt-rtx", lora_plugin="aot"
    )
    with pytest.raises(ConfigError, match=r"tensorrt-rtx has no ahead-of-time plugins"):
        build_engine(config)
