"""Weights in codes: what they mean, by hand and by ONNX Runtime, and through a graph and back."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.models.coded_graphs import BLOCK, K, N, coded_graph, float_codes, random_codes, run

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_weight import (
    E4M3,
    CodedWeight,
    coded_weights,
    packed,
    read_coded,
    unpacked,
    write_coded,
)
from trt_lora.builder.passes.linears import find_linears
from trt_lora.builder.passes.quantise_linears import QuantiseLinears

PRODUCT = "y = MatMul(x, w)"
BOTH = (False, True)
KINDS = [(bits, dtype, same, ordered) for bits in (4, 8) for dtype in ("float32", "float16")
         for same in BOTH for ordered in BOTH]  # fmt: skip
FIELDS = ("bits", "dtype", "is_symmetric", "is_ordered")


def test_a_weight_by_hand() -> None:
    codes = packed(np.array([[1, 15, 8, 0]], np.uint8))
    assert codes.tolist() == [[0xF1, 0x08]]  # the first of two codes is the low half
    scales = np.array([[0.5, 2]], np.float32)
    plain = CodedWeight(4, 2, codes, scales)
    assert plain.dequantised().tolist() == [[-3.5, 3.5, 0, -16]]  # (1 - 8) / 2, ...
    zeros = np.array([[1, 3]], np.uint8)
    assert CodedWeight(4, 2, codes, scales, zeros).dequantised().tolist() == [[0, 7, 10, -6]]
    whole = CodedWeight(8, 2, np.array([[0, 128, 255, 1]], np.uint8), scales)
    assert whole.dequantised().tolist() == [[-64, 0, 254, -254]]
    assert (plain.shape, whole.shape) == ((1, 4), (1, 4))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_share_an_x_that_is_rounded_to_floats_of_8_bits(
    dtype: str, tmp_path: Path
) -> None:
    scale = np.asarray(0.25, dtype)
    weight = replace(float_codes(dtype), x_scale=scale)
    model = coded_graph(weight, "c = MatMul(x, w) d = Gemm <transB = 1> (x, v) y = Add(c, d)")
    kinds = [node.op_type for node in model.graph if "uantize" in node.op_type]
    assert sorted(kinds) == ["DequantizeLinear", "DequantizeLinear", "QuantizeLinear"]
    x = np.random.default_rng(1).normal(size=(5, K)).astype(dtype)
    x[0, 0], x[1, 1] = 1000, -1000  # the largest is 448 / 4
    rounded = np.clip(x / scale, -448, 448).astype(E4M3).astype(np.float64) * 0.25
    assert np.abs(rounded).max() == 112
    expected = 2 * rounded @ weight.dequantised().T.astype(np.float64)
    y = run(model, x, tmp_path)
    error = np.abs(y - expected).max() / np.abs(expected).max()
    assert error < (1e-6 if dtype == "float32" else 2e-3)


def test_codes_that_are_floats_by_hand() -> None:
    """E4M3: a sign, four bits of an exponent that is 7 too large, three of a fraction."""
    codes = np.array([[0x38, 0xB8, 0x7E, 0x01]], np.uint8)
    weight = CodedWeight(8, 4, codes, np.array([[2]], np.float32), is_float=True)
    assert weight.dequantised().tolist() == [[2, -2, 896, 2**-8]]
    assert (weight.largest, weight.shape) == (448, (1, 4))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("is_ordered", BOTH)
@pytest.mark.parametrize("linear", [PRODUCT, "y = Gemm <transB = 1> (x, v)"])
def test_codes_that_are_floats_are_read_bit_for_bit_and_given_back(
    linear: str, is_ordered: bool, dtype: str, tmp_path: Path
) -> None:
    weight = float_codes(dtype, is_ordered=is_ordered)
    model = coded_graph(weight, linear)
    y = run(model, np.eye(K, dtype=dtype), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised())
    ((_, read),) = coded_weights(ir.load(tmp_path / "m.onnx"))
    assert (read.is_float, read.bits, read.block, read.zeros) == (True, 8, K, None)
    np.testing.assert_array_equal(read.codes, weight.codes)
    np.testing.assert_array_equal(read.scales, weight.scales)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_graph_and_what_is_read_of_it_have_the_codes_once_in_memory(bits: int) -> None:
    weight = random_codes(bits, "float16")
    graph = ir.Model(ir.Graph([], [], nodes=[], name="g"), ir_version=10)
    (node,) = write_coded(graph.graph, "w", weight)
    found = read_coded(node.outputs[0])
    assert found is not None
    assert np.shares_memory(found.codes, weight.codes)
    assert np.array_equal(found.codes, weight.codes)


def test_codes_in_an_order_of_their_own_by_hand() -> None:
    codes, scales = np.array([[1, 2, 3, 4]], np.uint8), np.array([[1, 10]], np.float32)
    order = np.array([2, 0, 3, 1])  # of k, so that 2 and 0 share a scale
    weight = CodedWeight(8, 2, codes, scales, np.zeros((1, 2), np.uint8), order)
    assert weight.dequantised().tolist() == [[2, 40, 1, 30]]


def test_factors_by_hand() -> None:
    """They are of k, not of the order of the codes."""
    codes, scales = np.array([[129, 130, 131]], np.uint8), np.array([[1]], np.float32)
    factors, order = np.array([1, 10, 100], np.float32), np.array([2, 0, 1])
    weight = CodedWeight(8, 3, codes, scales, None, order, factors=factors)
    assert weight.dequantised().tolist() == [[2, 30, 100]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("is_ordered", BOTH)
@pytest.mark.parametrize("linear", [PRODUCT, "y = Gemm <transB = 1> (x, v)"])
def test_factors_are_read_bit_for_bit_and_given_back(
    linear: str, is_ordered: bool, dtype: str, tmp_path: Path
) -> None:
    weight = random_codes(4, dtype, is_ordered=is_ordered, has_factors=True)
    y = run(coded_graph(weight, linear), np.eye(K, dtype=dtype), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised())
    ((path, read),) = coded_weights(ir.load(tmp_path / "m.onnx"))
    assert path == "proj"
    np.testing.assert_array_equal(read.factors, weight.factors)
    np.testing.assert_array_equal(read.dequantised(), weight.dequantised())
    (found,) = find_linears(coded_graph(weight, linear))
    assert (found.path, found.k, found.n, found.refusal) == ("proj", K, N, "")


def test_an_odd_number_of_codes_is_padded() -> None:
    codes = np.array([[1, 2, 3]], np.uint8)
    assert packed(codes).tolist() == [[0x21, 0x03]]
    assert unpacked(packed(codes)).tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize(FIELDS, KINDS)
@pytest.mark.parametrize("linear", [PRODUCT, "y = Gemm <transB = 1> (x, v)", "y = Gemm(x, w)"])
def test_a_graph_reads_the_weight_bit_for_bit(
    linear: str, bits: int, dtype: str, is_symmetric: bool, is_ordered: bool, tmp_path: Path
) -> None:
    weight = random_codes(bits, dtype, is_symmetric=is_symmetric, is_ordered=is_ordered)
    y = run(coded_graph(weight, linear), np.eye(K, dtype=dtype), tmp_path)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.T, weight.dequantised())


@pytest.mark.parametrize(FIELDS, KINDS)
def test_a_saved_graph_gives_the_codes_back(
    bits: int, dtype: str, is_symmetric: bool, is_ordered: bool, tmp_path: Path
) -> None:
    weight = random_codes(bits, dtype, is_symmetric=is_symmetric, is_ordered=is_ordered)
    ir.save(coded_graph(weight, PRODUCT), tmp_path / "m.onnx", external_data="m.data")
    ((path, read),) = coded_weights(ir.load(tmp_path / "m.onnx"))
    assert (path, read.bits, read.block, read.shape) == ("proj", bits, BLOCK, (N, K))
    np.testing.assert_array_equal(read.codes, weight.codes)
    np.testing.assert_array_equal(read.scales, weight.scales)
    for own, given in ((read.zeros, weight.zeros), (read.order, weight.order)):
        assert (own is None) == (given is None)
        np.testing.assert_array_equal(own, given)


def test_symmetric_weights_of_one_shape_share_their_zeros() -> None:
    weight = random_codes(8, "float32", is_symmetric=True)
    names = coded_graph(weight, PRODUCT).graph.initializers
    assert set(names) == {"proj.codes", "proj.scales", "zeros_6_3_8"}


def test_a_linear_in_codes_is_a_linear_of_the_same_sizes() -> None:
    for text, is_ordered in product((PRODUCT, "y = Gemm <transB = 1> (x, v)"), BOTH):
        model = coded_graph(random_codes(4, "float32", is_ordered=is_ordered), text)
        (linear,) = find_linears(model)
        assert (linear.path, linear.k, linear.n, linear.refusal) == ("proj", K, N, "")


def test_what_is_no_weight_in_codes_is_none() -> None:
    model = coded_graph(random_codes(4, "float32"), PRODUCT)
    assert read_coded(None) is None
    assert read_coded(gv.graph_input(model, "x")) is None
    assert read_coded(model.graph.outputs[0]) is None


def test_a_module_that_is_called_twice_has_its_codes_once() -> None:
    model = coded_graph(
        random_codes(4, "float32"), "c = MatMul(x, w) d = MatMul(x, w) y = Add(c, d)"
    )
    kinds = [node.op_type for node in model.graph]
    assert kinds == ["DequantizeLinear", *["Transpose", "MatMul"] * 2, "Add"]


def test_a_linear_of_another_path_keeps_its_weight() -> None:
    model = coded_graph(random_codes(4, "float32"), PRODUCT, "mlp")
    assert [node.op_type for node in model.graph] == ["MatMul"]
    assert list(model.graph.initializers) == ["w"]


def test_codes_come_before_metadata_goes() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 11, opset_import: ["" : 24]> g (float[2] x) => (float[2] y) '
        "{ y = Identity(x) }"
    )
    with pytest.raises(ir.passes.PreconditionError, match="no module paths"):
        QuantiseLinears({})(model)
