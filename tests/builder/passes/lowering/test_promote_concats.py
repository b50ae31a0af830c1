"""Operands of a Concat in one dtype."""

import numpy as np
import onnx_ir as ir
import onnxruntime

from trt_lora.builder.passes.lowering.promote_concats import PromoteConcats


def graph(*kinds: str) -> ir.Model:
    inputs = ", ".join(f"{kind}[2] x{place}" for place, kind in enumerate(kinds))
    names = ", ".join(f"x{place}" for place in range(len(kinds)))
    return ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g ({inputs}) => (float[n] y) {{ y = Concat <axis = 0> ({names}) }}
    """)


def test_what_is_narrower_is_cast() -> None:
    model = graph("float16", "float", "float16")
    assert PromoteConcats()(model).modified
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    feed = {
        "x0": np.array([1, 2], np.float16),
        "x1": np.array([0.1, 3], np.float32),
        "x2": np.array([4, 5], np.float16),
    }
    (y,) = session.run(None, feed)
    np.testing.assert_array_equal(np.asarray(y), np.array([1, 2, 0.1, 3, 4, 5], np.float32))


def test_one_dtype_is_left_as_it_is() -> None:
    model = graph("float", "float")
    assert not PromoteConcats()(model).modified
    assert [node.op_type for node in model.graph] == ["Concat"]
