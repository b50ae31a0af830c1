"""Quotients of negated sizes."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from trt_lora.builder.passes.lowering.floor_divisions import FloorDivisions


def graph(kind: str, factor: str) -> ir.Model:
    return ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g ({kind}[n] x) => ({kind}[n] y)
        <{kind} factor = {{{factor}}}, {kind} two = {{2}}>
        {{
            product = Mul (factor, x)
            y = Div (product, two)
        }}
    """)


def test_they_are_rounded_down() -> None:
    model, sizes = graph("int64", "-1"), np.arange(7)
    assert FloorDivisions()(model).modified
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (found,) = session.run(None, {"x": sizes})
    assert np.asarray(found).tolist() == (-sizes // 2).tolist()


@pytest.mark.parametrize(("kind", "factor"), [("float", "-1"), ("int64", "3")])
def test_other_quotients_are_left_as_they_are(kind: str, factor: str) -> None:
    model = graph(kind, factor)
    assert not FloorDivisions()(model).modified
    assert [node.op_type for node in model.graph] == ["Mul", "Div"]
