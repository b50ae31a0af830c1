"""LoRA inputs with a default: a graph that runs without them, and takes them as before."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from trt_lora.builder.passes.lora_function import lora_function
from trt_lora.builder.passes.lowering.optional_lora import OptionalLoRA
from trt_lora.plugins.contract.operators import DOMAIN, operator_named


def graph(kind: str, dtype: str) -> ir.Model:
    """One site behind the addend c; A and B of any rank."""
    operator = operator_named("LoraAdd1")
    assert operator is not None
    model = ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 24, "{DOMAIN}" : 1]>
g ({dtype}[m, 3] x, {dtype}[3, r] A, {dtype}[r, 4] B, {dtype}[m, 4] c) => ({dtype}[m, 4] y) {{
  y = {DOMAIN}.{kind}(x, A, B, c)
}}""")
    function = lora_function(operator, 24)
    model.functions[function.identifier()] = function
    return model


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_it_runs_without_an_adapter_and_with_one(dtype: str) -> None:
    model = graph("LoraAdd1", dtype)
    assert OptionalLoRA()(model).modified
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    assert [value.name for value in session.get_inputs()] == ["x", "c"]
    assert [value.name for value in session.get_overridable_initializers()] == ["A", "B"]
    numbers, kind = np.random.default_rng(0), np.float32 if dtype == "float" else np.float16
    sizes = (2, 3), (2, 4), (3, 2), (2, 4)
    x, c, a, b = (np.asarray(numbers.normal(size=size), kind) for size in sizes)
    without = np.asarray(session.run(None, {"x": x, "c": c})[0])
    assert np.array_equal(without, c)
    y = np.asarray(session.run(None, {"x": x, "c": c, "A": a, "B": b})[0])
    wide_x, wide_c, wide_a, wide_b = (each.astype(np.float64) for each in (x, c, a, b))
    expected = wide_c + wide_x @ wide_a @ wide_b
    np.testing.assert_allclose(y, expected, atol=1e-6 if dtype == "float" else 1e-2)


def test_stacks_stay_as_they_are() -> None:
    assert not OptionalLoRA()(graph("LoraSlotsAdd1", "float")).modified
