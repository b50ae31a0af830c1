"""An engine without LoRA, for comparison: the same forms of the graph, the same logits."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from conftest import TinyEngine
from support.models.token_graphs import GATED, feeds, graph, run

from trt_lora.builder.passes.lowering.flatten_batch import FlattenBatch
from trt_lora.builder.passes.lowering.fuse_add_into_gemm import FuseAddIntoGemm
from trt_lora.builder.passes.remove_lora import RemoveLoRA, engine_without_lora
from trt_lora.runtime import LoRAManager, TensorMap, open_engine
from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.manifest import ONNX_CPU_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE, read_manifest


def logits(directory: Path, ids: Ids) -> Logits:
    with open_engine(directory, "onnxruntime") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        tensor_map = TensorMap()
        manager.refresh_tensor_map(tensor_map)
        found: Logits = StaticDecoder(engine, tensor_map, len(ids)).run(ids)
        return found


def test_what_runs_on_a_cpu_is_the_engines_own_form_less_lora(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    plain = engine_without_lora(tiny_engine.engine, tmp_path)
    assert set(read_manifest(plain).files) == {ONNX_CPU_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE}
    assert not read_manifest(plain).lora_bindings
    ids = np.arange(1, 7).reshape(2, 3)
    assert np.array_equal(logits(plain, ids), logits(tiny_engine.engine, ids))


def test_a_delta_behind_a_transpose_goes_with_its_sum() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 18, "trt_lora" : 1]>
        g (float[1, 2, 3] x, float[2, r] a, float[r, 4] b) => (float[1, 4, 3] z)
        <float[4, 2, 1] w = {1, 2, 3, 4, 5, 6, 7, 8}>
        { y = Conv (x, w) t = Transpose <perm = [0, 2, 1]> (x) d = trt_lora.LoraDelta1 (t, a, b)
          u = Transpose <perm = [0, 2, 1]> (d) z = Add (y, u) }
    """)
    RemoveLoRA(frozenset({"a", "b"}))(model)
    assert [node.op_type for node in model.graph] == ["Conv"]
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "z"]


CHAINED = GATED.replace("(g, ", "(y1, ").replace(
    "y = Add(r, l3)", "z = Add(r, l3)\n  y = Mul(z, g)"
)


@pytest.mark.parametrize("body", [GATED, CHAINED], ids=["gated", "a site reads another"])
@pytest.mark.parametrize("is_flat", [True, False])
def test_what_was_inlined_goes_with_its_products(body: str, is_flat: bool) -> None:
    model, inputs = graph(body), feeds(2, 3)
    factors = frozenset(inputs) - {"input_ids"}
    zeros = {name: np.zeros_like(array) for name, array in inputs.items() if name in factors}
    expected = run(model, inputs | zeros)
    if is_flat:
        FlattenBatch()(model)
    FuseAddIntoGemm()(model)
    before = len(model.graph)
    RemoveLoRA(factors)(model)
    assert [value.name for value in model.graph.inputs] == ["input_ids"]
    assert before - len(model.graph) == (2 if is_flat else 3) * 3  # of three sites
    np.testing.assert_allclose(run(model, inputs), expected, rtol=1e-6, atol=1e-6)
