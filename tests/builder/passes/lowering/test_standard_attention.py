"""Attention as ONNX Runtime and TensorRT both read it."""

import numpy as np
import onnx_ir as ir
import pytest
from support.models.static_graphs import Layer, named, run, step

from trt_lora.builder.passes.lowering.standard_attention import StandardAttention


def lowered(layer: Layer) -> ir.Model:
    model = layer.model()
    StandardAttention()(model)
    return model


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_a_soft_cap_written_out_is_onnx_runtimes_own(softcap: float, new: int) -> None:
    layer = Layer(softcap=softcap)
    model, feeds = lowered(layer), step(layer, [3, 9, 0], new)
    assert not [node for node in model.graph if node.op_type == "Attention"]
    expected, *_ = run(layer.model(), feeds)
    found, *_ = run(model, feeds)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    uncapped, *_ = run(lowered(Layer()), feeds)
    assert np.abs(uncapped - expected).max() > 1e-4


def test_attention_reads_the_boolean_mask() -> None:
    layer = Layer(window=3)
    model, feeds = lowered(layer), step(layer, [3, 9, 0], 2)
    (attention,) = [node for node in model.graph if node.op_type == "Attention"]
    assert attention.inputs[3] is named(model, "seen")
    assert "softcap" not in attention.attributes
    np.testing.assert_array_equal(run(model, feeds)[0], run(layer.model(), feeds)[0])


def test_a_mask_that_is_another_sum_stays_as_it_is() -> None:
    model = Layer().model()
    (where,) = [node for node in model.graph if node.op_type == "Where"]
    where.replace_input_with(1, where.inputs[2])
    StandardAttention()(model)
    (attention,) = [node for node in model.graph if node.op_type == "Attention"]
    assert attention.inputs[3] is where.outputs[0]
