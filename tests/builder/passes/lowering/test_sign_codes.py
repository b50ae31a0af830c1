"""Codes as TensorRT takes them: each weight bit for bit, by ONNX Runtime, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.models.coded_graphs import (
    BLOCK,
    K,
    N,
    coded_graph,
    float_codes,
    random_codes,
    run,
    tied_answer,
    tied_graph,
)

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_weight import CodedWeight
from trt_lora.builder.passes.lowering.sign_codes import SignCodes, has_signed_form

PRODUCT = "y = MatMul(x, w)"


def signed_codes(bits: int, dtype: str = "float32", *, is_ordered: bool = True) -> CodedWeight:
    """Random codes whose zeros are the middle, with scales above 0; of 8 bits one a row."""
    weight = random_codes(bits, dtype, is_symmetric=True, is_ordered=is_ordered)
    scales = np.abs(weight.scales)
    return replace(weight, scales=scales if bits == 4 else np.repeat(scales[:, :1], 3, axis=1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("linear", [PRODUCT, "y = Gemm <transB = 1> (x, v)"])
def test_the_weight_is_read_bit_for_bit(linear: str, bits: int, dtype: str, tmp_path: Path) -> None:
    weight = signed_codes(bits, dtype)
    model = coded_graph(weight, linear)
    assert SignCodes()(model).modified
    node = model.graph[0]
    codes, scales = (value.const_value for value in node.inputs if value)
    assert codes is not None
    assert scales is not None
    expected = (ir.DataType.INT4, (N, K // BLOCK)) if bits == 4 else (ir.DataType.INT8, (N,))
    assert (codes.dtype, scales.shape.numpy()) == expected
    assert len(model.graph.initializers) == 2
    y = run(model, np.eye(K, dtype=dtype), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_codes_that_are_floats_stay_as_they_are(dtype: str, tmp_path: Path) -> None:
    weight = float_codes(dtype)
    weight.codes[2], weight.scales[2] = 0, 0
    model = coded_graph(weight, PRODUCT)
    assert SignCodes()(model).modified
    codes, scales = (gv.present(gv.present(each).const_value) for each in model.graph[0].inputs)
    assert (codes.dtype, scales.shape.numpy()) == (ir.DataType.FLOAT8E4M3FN, (N,))
    assert (scales.numpy() > 0).all()
    y = run(model, np.eye(K, dtype=dtype), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_nodes_of_a_product(bits: int) -> None:
    """Before and after, as ONNX text has them."""
    model = coded_graph(signed_codes(bits), PRODUCT)
    before = [node.op_type for node in model.graph]
    block = {"axis": 1, "block_size": BLOCK}
    assert before == ["DequantizeLinear", "Transpose", "MatMul"]
    assert [value.name for value in model.graph[0].inputs if value] == [
        "proj.codes",
        "proj.scales",
        f"zeros_{N}_{K // BLOCK}_{bits}",
    ]
    assert attributes(model) == block
    SignCodes()(model)
    assert [node.op_type for node in model.graph] == before
    names = [value.name for value in model.graph[0].inputs if value]
    assert names == ["proj.signed.codes", "proj.signed.scales"]
    assert attributes(model) == (block if bits == 4 else {"axis": 0})


def attributes(model: ir.Model) -> dict[str, int]:
    return {name: each.as_int() for name, each in model.graph[0].attributes.items()}


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_in_an_order_of_their_own_are_multiplied_by_x_in_theirs(
    bits: int, tmp_path: Path
) -> None:
    weight = signed_codes(bits, is_ordered=False)
    model = coded_graph(weight, "c = MatMul(x, w) d = Gemm <transB = 1> (x, v) y = Add(c, d)")
    for node in model.graph:  # both are of one module
        if node.op_type == "Gemm":
            made = next(each for each in model.graph if each.op_type == "Gather").outputs[0]
            node.replace_input_with(1, made)
    assert SignCodes()(model).modified
    kinds = [node.op_type for node in model.graph]
    assert sorted(kinds) == ["Add", "DequantizeLinear", "Gather", "Gemm", "MatMul", "Transpose"]
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, 2 * weight.dequantised())


def test_x_has_the_factors_of_a_weight(tmp_path: Path) -> None:
    factors = np.linspace(0.5, 2, K, dtype=np.float32)
    weight = replace(signed_codes(4, is_ordered=False), factors=factors)
    model = coded_graph(weight, PRODUCT)
    assert SignCodes()(model).modified
    kinds = sorted(node.op_type for node in model.graph)
    assert kinds == ["DequantizeLinear", "Gather", "MatMul", "Mul", "Transpose"]
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_allclose(y.T, weight.dequantised(), rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_of_a_block_of_zeros_becomes_one(bits: int, tmp_path: Path) -> None:
    """TensorRT takes scales above 0 alone."""
    weight = signed_codes(bits)
    weight.scales[2], weight.codes[2] = 0, 0x88 if bits == 4 else 0x80
    model = coded_graph(weight, PRODUCT)
    SignCodes()(model)
    scales = model.graph.initializers["proj.signed.scales"].const_value
    assert scales is not None
    assert (scales.numpy() > 0).all()
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_a_scale_that_has_become_0_are_0(bits: int, tmp_path: Path) -> None:
    """Half precision has no scale of 1e-9: the weight is 0 on a CPU, and so it is in a plan."""
    for weight in (signed_codes(bits, "float16"), float_codes("float16")):
        weight.scales[2] = np.float32(1e-9)
        assert weight.codes[2].any()
        model = coded_graph(weight, PRODUCT)
        SignCodes()(model)
        y = run(model, np.eye(K, dtype=np.float16), tmp_path)
        assert not y.T[2].any()
        np.testing.assert_array_equal(y.T, weight.dequantised())


def test_zeros_negative_scales_and_several_scales_a_row_are_refused() -> None:
    zeros, blocks = random_codes(4, "float32"), random_codes(8, "float32", is_symmetric=True)
    negative = random_codes(4, "float32", is_symmetric=True)
    blocks.scales[:] = np.abs(blocks.scales)
    floats = replace(float_codes("float32"), block=BLOCK, scales=np.abs(blocks.scales))
    for weight in (zeros, blocks, negative, floats):
        assert not has_signed_form(weight)
        with pytest.raises(ir.passes.PreconditionError, match="codes of proj have zeros, or sev"):
            SignCodes()(coded_graph(weight, PRODUCT))
    assert has_signed_form(signed_codes(4))
    assert has_signed_form(signed_codes(8))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_batch_of_one_is_none(bits: int, tmp_path: Path) -> None:
    weight = signed_codes(bits)
    linear = "a = Constant <value_ints = [0]> () c = Unsqueeze(x, a) d = MatMul(c, w)"
    model = coded_graph(weight, f"{linear} y = Squeeze(d, a)")
    batch = model.graph[1].outputs[0]
    batch.type, batch.shape = model.graph.inputs[0].type, ir.Shape([1, "t", K])
    SignCodes()(model)
    kinds = [node.op_type for node in model.graph if "queeze" in node.op_type]
    assert kinds == ["Unsqueeze", "Squeeze", "Unsqueeze", "Squeeze"]
    (product,) = (node for node in model.graph if node.op_type == "MatMul")
    assert gv.present(product.inputs[0]).shape == ir.Shape(["t", K])
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_read_bit_for_bit(bits: int, tmp_path: Path) -> None:
    weight = signed_codes(bits)
    model = tied_graph(weight)
    SignCodes()(model)
    assert [node.op_type for node in model.graph].count("DequantizeLinear") == 1
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y, tied_answer(weight))


def test_a_graph_without_codes_stays() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 11, opset_import: ["" : 24]> g (float[2] x) => (float[2] y) { y = Abs(x) }'
    )
    assert not SignCodes()(model).modified
