"""polygraphy's other tools on our files, LoRA nodes included."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conftest import TinyEngine
from support.doc_blocks import ROOT
from support.models.quick_build import quick_build
from support.models.tiny_models import tiny_config
from support.polygraphy_command import polygraphy, script

from trt_lora.builder.passes.codes.coded_weight import coded_weights
from trt_lora.plugins.contract.operators import DOMAIN
from trt_lora.runtime import read_manifest
from trt_lora.runtime.manifest import ONNX_FILE

pytestmark = pytest.mark.slow

NETWORK = ROOT / "scripts" / "polygraphy_extension" / "network_script.py"


@pytest.fixture(scope="module")
def engine(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA on all linears: nodes that return deltas, and nodes that add."""
    directory = tmp_path_factory.mktemp("tools") / "engine"
    quick_build(tiny_config(tiny_engine.model, directory))
    return directory


def nodes(model: Path) -> Counter[str]:
    """Return how many LoRA nodes of each kind a file has."""
    graph = onnx.load(model, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node if node.domain == DOMAIN)


def test_inspect_shows_every_lora_node_with_its_inputs(engine: Path) -> None:
    text = polygraphy("inspect", "model", engine / ONNX_FILE, "--show", "layers").text
    for kind, count in nodes(engine / ONNX_FILE).items():
        assert text.count(f"[Op: {kind}]") == count > 0
    for name in read_manifest(engine).lora_bindings:
        assert name in text


def test_a_sanitized_model_keeps_lora_and_computes_the_same(
    engine: Path, tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    model, sanitized = engine / ONNX_FILE, tmp_path / ONNX_FILE
    polygraphy("surgeon", "sanitize", model, "--fold-constants", "-o", sanitized)
    before, after = (onnx.load(path, load_external_data=False) for path in (model, sanitized))
    assert nodes(sanitized) == nodes(model)
    assert [function.name for function in after.functions] == [f.name for f in before.functions]
    assert [value.name for value in after.graph.input] == [v.name for v in before.graph.input]
    outputs = tmp_path / "outputs.json"
    options = ("--onnxrt", "--lora-adapter", f"a={tiny_engine.adapter}", "--lora-engine", engine)
    polygraphy("run", model, *options, "--save-outputs", outputs)
    done = polygraphy("run", sanitized, *options, "--load-outputs", outputs, "--atol", "1e-5")
    assert "Passed: 2/2 iterations" in done.text


def test_convert_makes_a_plan_with_the_plugin_and_the_engines_profiles(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    """Of an engine in codes, whose bytes are in the plan."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    engine, network, plan = (tmp_path / name for name in ("engine", "network.py", "plugin.plan"))
    options = {"quantize": "int4", "quantize_block": 16, "flavour": "tensorrt-rtx"}
    quick_build(tiny_config(tiny_engine.model, engine, **options))
    script(NETWORK, engine, network)
    done = polygraphy(
        "convert", network, "--trt-config-script", network, "--convert-to", "trt", "-o", plan,
        rtx=True,
    )  # fmt: skip
    assert len(done.lines("input_ids [min=(1, 1), opt=(1, 1), max=(2, 1)]")) == 1
    assert len(done.lines("input_ids [min=(1, 1), opt=(1, 32), max=(2, 32)]")) == 1
    weights = [weight for _, weight in coded_weights(ir.load(engine / ONNX_FILE))]
    codes = [np.bitwise_xor(weight.codes, 0x88) for weight in weights if weight.bits == 4]
    assert len(codes) == 14
    assert all(each.tobytes() in plan.read_bytes() for each in codes)
    count = tmp_path / "count.py"
    count.write_text(
        "from network import load_network\n"
        "builder, network, parser = load_network()\n"
        "kinds = [network.get_layer(i).type.name for i in range(network.num_layers)]\n"
        "print('plugin layers:', kinds.count('PLUGIN_V3'))\n"
    )
    (line,) = script(count, rtx=True).lines("plugin layers:")
    assert int(line.split()[-1]) == nodes(engine / ONNX_FILE).total()


def test_a_network_of_no_engine_is_refused(tmp_path: Path) -> None:
    done = script(NETWORK, tmp_path, tmp_path / "network.py", expected=2)
    assert "is not an engine directory" in done.text
    assert not (tmp_path / "network.py").exists()
