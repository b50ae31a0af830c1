"""Products by codes themselves: the weight bit for bit, the sums of a Gemm, and what stays."""

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

from trt_lora.builder.passes.codes.coded_weight import write_coded
from trt_lora.builder.passes.lowering.multiply_codes import MultiplyCodes
from trt_lora.builder.save_graphs import _share_weights
from trt_lora.runtime.memory.dtypes import Array

PRODUCT = "y = MatMul(x, w)"


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("linear", [PRODUCT, "y = Gemm <transB = 1> (x, v)"])
def test_the_weight_is_read_bit_for_bit(
    linear: str, bits: int, dtype: str, is_symmetric: bool, tmp_path: Path
) -> None:
    weight = random_codes(bits, dtype, is_symmetric=is_symmetric)
    model = coded_graph(weight, linear)
    assert MultiplyCodes("exact")(model).modified
    (node,) = model.graph
    assert (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits")
    assert len(node.inputs) == (3 if is_symmetric else 4)
    sizes = {name: node.attributes[name].as_int() for name in ("N", "K", "bits", "block_size")}
    assert sizes == {"N": N, "K": K, "bits": bits, "block_size": BLOCK}
    y = run(model, np.eye(K, dtype=dtype), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_in_an_order_of_their_own_are_multiplied_by_x_in_theirs(
    bits: int, tmp_path: Path
) -> None:
    weight = random_codes(bits, "float32", is_ordered=False)
    model = coded_graph(weight, "c = MatMul(x, w) d = MatMul(x, w) y = Add(c, d)")
    assert MultiplyCodes("exact")(model).modified
    assert kinds(model) == ["Gather", "MatMulNBits", "MatMulNBits", "Add"]
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, 2 * weight.dequantised())


@pytest.mark.parametrize("is_ordered", [False, True])
def test_x_has_the_factors_of_a_weight(is_ordered: bool, tmp_path: Path) -> None:
    weight = random_codes(4, "float32", is_ordered=is_ordered, has_factors=True)
    model = coded_graph(weight, "c = MatMul(x, w) d = MatMul(x, w) y = Add(c, d)")
    assert MultiplyCodes("exact")(model).modified
    order = [] if is_ordered else ["Gather"]
    assert kinds(model) == ["Mul", *order, "MatMulNBits", "MatMulNBits", "Add"]
    x = np.random.default_rng(0).normal(size=(5, K)).astype(np.float32)
    expected = 2 * x @ weight.dequantised().T
    np.testing.assert_allclose(run(model, x, tmp_path), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_read_bit_for_bit(
    bits: int, dtype: str, is_symmetric: bool, tmp_path: Path
) -> None:
    weight = random_codes(bits, dtype, is_symmetric=is_symmetric)
    model = tied_graph(weight)
    assert MultiplyCodes("exact")(model).modified
    assert sorted(kinds(model)) == [
        *("Concat", "Constant", "GatherBlockQuantized", "MatMulNBits", "Transpose")
    ]
    y = run(model, np.eye(K, dtype=dtype), tmp_path)
    np.testing.assert_array_equal(y, tied_answer(weight))


def test_codes_that_are_floats_stay() -> None:
    """ONNX Runtime multiplies by integers alone."""
    model = coded_graph(float_codes("float32"), PRODUCT)
    before = kinds(model)
    assert not MultiplyCodes("exact")(model).modified
    assert kinds(model) == before


def test_each_order_has_a_gather_of_its_own(tmp_path: Path) -> None:
    first, second = (random_codes(bits, "float32", is_ordered=False) for bits in (4, 8))
    model = coded_graph(first, "c = MatMul(x, w) d = Gemm <transB = 1> (x, v) y = Add(c, d)")
    (gemm,) = (node for node in model.graph if node.op_type == "Gemm")
    others = write_coded(model.graph, "other", second)
    model.graph.insert_before(gemm, others)
    gemm.replace_input_with(1, others[-1].outputs[0])
    assert MultiplyCodes("exact")(model).modified
    assert kinds(model).count("Gather") == 2
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, first.dequantised() + second.dequantised())


@pytest.mark.parametrize(("level", "accuracy"), [("exact", 1), ("fast", 4)])
def test_the_level_is_onnx_runtimes(level: str, accuracy: int) -> None:
    model = coded_graph(random_codes(4, "float32"), PRODUCT)
    MultiplyCodes(level)(model)
    assert model.graph[0].attributes["accuracy_level"].as_int() == accuracy


def test_fast_products_take_x_in_8_bits_and_are_close(tmp_path: Path) -> None:
    weight = random_codes(8, "float32", is_symmetric=True)
    x = np.random.default_rng(1).normal(size=(5, K)).astype(np.float32)
    expected, ys = x @ weight.dequantised().T, []
    for level in ("exact", "fast"):
        model = coded_graph(weight, PRODUCT)
        MultiplyCodes(level)(model)
        ys.append(run(model, x, tmp_path))
    scale = np.abs(expected).max()
    errors = [float(np.abs(y - expected).max() / scale) for y in ys]
    assert errors[0] < 1e-6 < 1e-4 < errors[1] < 2e-2


def test_a_bias_is_added_behind_and_an_output_keeps_its_name(tmp_path: Path) -> None:
    weight = random_codes(4, "float32")
    model = coded_graph(weight, "y = Gemm <transB = 1> (x, v, b)")
    MultiplyCodes("exact")(model)
    assert kinds(model) == ["MatMulNBits", "Add"]
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, weight.dequantised() + np.float32(1))


def test_a_module_that_is_called_twice_reads_the_same_codes(tmp_path: Path) -> None:
    weight = random_codes(4, "float32")
    model = coded_graph(weight, "c = MatMul(x, w) d = MatMul(x, w) y = Add(c, d)")
    MultiplyCodes("exact")(model)
    assert kinds(model) == ["MatMulNBits", "MatMulNBits", "Add"]
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, 2 * weight.dequantised())


@pytest.mark.parametrize(
    "linear", ["y = Gemm <transB = 1, alpha = 2.0> (x, v)", "m = MatMul(x, w) y = Add(m, m)"]
)
def test_what_scales_its_product_stays_and_another_sum_does_not_hinder(
    linear: str, tmp_path: Path
) -> None:
    weight = random_codes(4, "float32")
    model = coded_graph(weight, linear)
    assert MultiplyCodes("exact")(model).modified == ("Gemm" not in linear)
    y = run(model, np.eye(K, dtype=np.float32), tmp_path)
    np.testing.assert_array_equal(y.T, 2 * weight.dequantised())


@pytest.mark.parametrize("bits", [4, 8])
def test_both_graphs_lie_over_one_file_where_their_bytes_are_equal(
    bits: int, tmp_path: Path
) -> None:
    """Zeros two in a byte are padded row by row in one of them: three blocks a row."""
    weight = random_codes(bits, "float32")
    model = coded_graph(weight, PRODUCT)
    own = model.clone()
    ir.save(model, tmp_path / "a.onnx", external_data="a.data", size_threshold_bytes=0)
    MultiplyCodes("exact")(own)
    _share_weights(own, ir.load(tmp_path / "a.onnx"))
    ir.save(own, tmp_path / "b.onnx")
    values = ir.load(tmp_path / "b.onnx").graph.initializers
    lie_outside = {
        name.removeprefix("proj.").partition("_")[0]
        for name, value in values.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert lie_outside == ({"codes", "scales"} if bits == 4 else {"codes", "scales", "zeros"})
    np.testing.assert_array_equal(answers(tmp_path / "b.onnx").T, weight.dequantised())


def answers(path: Path) -> Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": np.eye(K, dtype=np.float32)})[0])
