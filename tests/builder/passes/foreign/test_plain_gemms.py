"""The pass that frees x of what a Gemm does to it, by ONNX Runtime."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.foreign.find_linears import find_graph_linears
from trt_lora.builder.passes.foreign.names import ModuleNames
from trt_lora.builder.passes.foreign.plain_gemms import PlainGemms
from trt_lora.builder.passes.insert_lora import InsertLoRA
from trt_lora.builder.targets import Targets

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def gemm(attributes: str, shape: str) -> ir.Model:
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float{shape} x) => (float[2, 4] z)
        <float[3, 4] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}, float[4] b = {{1, 2, 3, 4}}>
        {{ z = Gemm <{attributes}> (x, w, b) }}
    """)
    model.graph[0].name = "/fc/Gemm"
    ShapeInferencePass()(model)
    return model


def run(model: ir.Model, **feeds: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize(
    ("attributes", "shape", "x", "alpha"),
    [
        ("alpha = 0.5, beta = 2.0", "[2, 3]", X, 0.5),
        ("transA = 1", "[3, 2]", X.T.copy(), 1),
        ("transA = 1, alpha = 3.0", "[3, 2]", X.T.copy(), 3),
        ("beta = 2.0", "[2, 3]", X, 1),
    ],
)
def test_lora_is_what_a_change_of_the_weight_is(
    attributes: str, shape: str, x: np.ndarray, alpha: float
) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((3, 2), np.float32), rng.random((2, 4), np.float32)
    plain, merged = gemm(attributes, shape), gemm(attributes, shape)
    before = run(plain, x=x)
    weight = merged.graph.initializers["w"]
    weight.const_value = ir.tensor(gv.present(weight.const_value).numpy() + a @ b, name="w")
    assert PlainGemms()(plain).modified == (alpha != 1 or "transA" in attributes)
    np.testing.assert_allclose(run(plain, x=x), before, rtol=1e-6)
    linears = [*find_graph_linears(plain, ModuleNames())]
    InsertLoRA(Targets.from_names(["all-linear"]), linears=linears)(plain)
    adapted = run(plain, x=x, lora_A_fc=a, lora_B_fc=b)
    np.testing.assert_allclose(adapted, run(merged, x=x), rtol=1e-5)
    assert np.abs(adapted - before).max() > 0.1


def test_a_gemm_of_two_activations_is_left_alone() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 3] x, float[2, 4] y) => (float[3, 4] z) { z = Gemm <transA = 1> (x, y) }
    """)
    assert not PlainGemms()(model).modified
