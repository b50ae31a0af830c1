"""One product for all linears that read one x, by ONNX Runtime, and what stays by itself."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.models.coded_graphs import K, coded_graph, float_codes, random_codes, run

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_weight import CodedWeight, write_coded
from trt_lora.builder.passes.lowering.multiply_side_by_side import MultiplySideBySide
from trt_lora.builder.passes.lowering.sign_codes import SignCodes

THREE = "a = MatMul(x, w) d = MatMul(x, w) c = MatMul(x, w) y = Concat <axis = -1> (a, d, c)"


def weight_of(bits: int, n: int, *, is_ordered: bool = True) -> CodedWeight:
    """Random codes [n, K], their scales above 0, of 8 bits one a row."""
    weight = random_codes(bits, "float32", is_symmetric=True, is_ordered=is_ordered)
    scales = np.abs(weight.scales[-n:])
    scales = scales if bits == 4 else np.repeat(scales[:, :1], scales.shape[1], axis=1)
    return replace(weight, codes=weight.codes[-n:], scales=scales)


def graph_of(linear: str, weights: Sequence[CodedWeight]) -> ir.Model:
    """A graph whose products have these weights, signed."""
    model = coded_graph(weights[0], linear)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    for place in range(1, len(weights)):
        nodes = write_coded(model.graph, f"proj{place}", weights[place])
        nodes.append(ir.node("Transpose", [nodes[-1].outputs[0]], {"perm": [1, 0]}))
        model.graph.insert_before(products[place], nodes)
        products[place].replace_input_with(1, nodes[-1].outputs[0])
    model.graph.outputs[0].shape = None
    SignCodes()(model)
    return model


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def answer(model: ir.Model, folder: Path) -> np.ndarray:
    return run(model, np.eye(K, dtype=np.float32), folder)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_one_x_become_one_with_the_weights_one_below_the_other(
    bits: int, tmp_path: Path
) -> None:
    weights = [weight_of(bits, n) for n in (6, 2, 5)]
    model = graph_of(THREE, weights)
    assert kinds(model) == ["DequantizeLinear", "Transpose", "MatMul"] * 3 + ["Concat"]
    assert MultiplySideBySide()(model).modified
    assert kinds(model) == ["DequantizeLinear", "Transpose", "MatMul", "Split", "Concat"]
    codes = gv.present(model.graph[0].inputs[0])
    assert codes.name == "a.codes"
    assert gv.present(codes.shape).numpy() == (13, K)
    expected = np.concatenate([weight.dequantised() for weight in weights])
    np.testing.assert_array_equal(answer(model, tmp_path).T, expected)


def test_codes_that_are_floats_become_one(tmp_path: Path) -> None:
    weights = [float_codes("float32"), float_codes("float32")]
    weights[1].codes[:] = weights[0].codes[::-1]
    model = graph_of("a = MatMul(x, w) d = MatMul(x, w) y = Concat <axis = -1> (a, d)", weights)
    assert MultiplySideBySide()(model).modified
    assert kinds(model) == ["DequantizeLinear", "Transpose", "MatMul", "Split", "Concat"]
    expected = np.concatenate([weight.dequantised() for weight in weights])
    np.testing.assert_array_equal(answer(model, tmp_path).T, expected)


def test_codes_in_one_order_share_what_they_read(tmp_path: Path) -> None:
    weights = [weight_of(4, n, is_ordered=False) for n in (6, 2, 5)]
    model = graph_of(THREE, weights)
    assert MultiplySideBySide()(model).modified
    assert kinds(model).count("Gather") == kinds(model).count("MatMul") == 1
    expected = np.concatenate([weight.dequantised() for weight in weights])
    np.testing.assert_array_equal(answer(model, tmp_path).T, expected)


def test_other_bits_blocks_orders_and_another_x_are_products_of_their_own(tmp_path: Path) -> None:
    four, eight, ordered = weight_of(4, 6), weight_of(8, 6), weight_of(4, 6, is_ordered=False)
    wide, floats = replace(four, block=K, scales=four.scales[:, :1]), float_codes("float32")
    for weights in ([four, eight], [four, ordered], [four, wide], [eight, floats]):
        model = graph_of("a = MatMul(x, w) d = MatMul(x, w) y = Add(a, d)", weights)
        assert not MultiplySideBySide()(model).modified
        expected = sum(weight.dequantised() for weight in weights)
        np.testing.assert_array_equal(answer(model, tmp_path).T, expected)
    twice = "a = MatMul(x, w) u = Add(x, x) d = MatMul(u, w) y = Add(a, d)"
    model = graph_of(twice, [four, four])
    assert not MultiplySideBySide()(model).modified
    np.testing.assert_array_equal(answer(model, tmp_path).T, 3 * four.dequantised())


@pytest.mark.parametrize(
    "linear",
    [
        "a = MatMul(x, w) d = MatMul(x, w) y = Add(a, d)",  # a module that is called twice
        "a = Gemm <transB = 1> (x, v) d = Gemm <transB = 1> (x, v) y = Add(a, d)",
    ],
)
def test_a_weight_that_is_read_twice_and_a_gemm_stay(linear: str, tmp_path: Path) -> None:
    weight = weight_of(4, 6)
    model = coded_graph(weight, linear)
    SignCodes()(model)
    assert not MultiplySideBySide()(model).modified
    np.testing.assert_array_equal(answer(model, tmp_path).T, 2 * weight.dequantised())


def test_float_weights_stay(tmp_path: Path) -> None:
    model = coded_graph(weight_of(4, 6), THREE, path="other")
    model.graph.outputs[0].shape = None
    assert not MultiplySideBySide()(model).modified
    assert (answer(model, tmp_path) == 1).all()
