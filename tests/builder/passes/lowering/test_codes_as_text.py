"""Two linears of one x, as ONNX text: of floats, of codes, for ONNX Runtime and for TensorRT."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from support.models.coded_graphs import BLOCK, K, N, float_codes, nvfp4_codes, random_codes
from support.models.exporter_metadata import come_from

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_weight import CodedWeight
from trt_lora.builder.passes.lowering.multiply_codes import MultiplyCodes
from trt_lora.builder.passes.lowering.multiply_side_by_side import MultiplySideBySide
from trt_lora.builder.passes.lowering.sign_codes import SignCodes
from trt_lora.builder.passes.quantise_linears import QuantiseLinears

FLOATS = """
a = MatMul(x, w)
b = Gemm<transB=1>(x, v, bias)
y = Add(a, b)
"""
PRODUCTS = """
a = MatMul(x, w)
b = MatMul(x, w)
y = Add(a, b)
"""


def graph(linears: str, weight: CodedWeight, other: CodedWeight | None = None) -> ir.Model:
    """Linears `q` and `k`, which make a and b, and their sum, read the same codes, or two."""
    text = linears.replace("<", " <").replace(">", "> ")
    model = ir.from_onnx_text(
        f'<ir_version: 11, opset_import: ["" : 24]> g (float[t, {K}] x) => (float[t, {N}] y) '
        f"{{ {text} }}"
    )
    values = {"w": (K, N), "v": (N, K), "bias": (N,)}
    for node in model.graph:
        for place, value in enumerate(node.inputs):
            if value is not None and value.name in values:
                tensor = ir.tensor(np.ones(values[value.name], np.float32), name=value.name)
                own = gv.initializer(model.graph, value.name, tensor)
                node.replace_input_with(place, own)
    for node, path in zip(model.graph, ("q", "k", "sum"), strict=True):
        come_from(node, path)
    QuantiseLinears({"q": weight, "k": other or weight})(model)
    return model


def as_text(model: ir.Model) -> str:
    """A line for each node; values without a name of the graph's or of weights are numbered."""
    return "".join(f"\n{line}" for line in _lines(model)) + "\n"


def _lines(model: ir.Model) -> Iterator[str]:
    names: dict[ir.Value | None, str] = {}
    for node in model.graph:
        for value in node.outputs:
            known = value.name in ("a", "b", "y")
            names[value] = str(value.name) if known else f"_{len(names)}"
        fields = [f"{name}={a.value}" for name, a in sorted(node.attributes.items())]
        operator = node.op_type + (f"<{', '.join(fields)}>" if fields else "")
        operands = map(gv.present, node.inputs)
        read = ", ".join(names.get(v, re.sub(r"val_\d+", "_", str(v.name))) for v in operands)
        yield f"{', '.join(names[value] for value in node.outputs)} = {operator}({read})"


def four_bits() -> CodedWeight:
    """Codes as TensorRT takes them, too."""
    weight = random_codes(4, "float32", is_symmetric=True)
    return replace(weight, scales=np.abs(weight.scales))


def test_linears_read_codes_through_an_operator_of_the_standard() -> None:
    assert (
        as_text(graph(FLOATS, random_codes(4, "float32")))
        == f"""
_0 = DequantizeLinear<axis=1, block_size={BLOCK}>(q.codes, q.scales, q.zeros_4)
_1 = Transpose<perm=(1, 0)>(_0)
a = MatMul(x, _1)
_3 = DequantizeLinear<axis=1, block_size={BLOCK}>(k.codes, k.scales, k.zeros_4)
b = Gemm<transB=1>(x, _3, bias)
y = Add(a, b)
"""
    )


def test_factors_and_order_are_of_the_weight_until_a_graph_is_lowered() -> None:
    weight = random_codes(4, "float32", is_ordered=False, has_factors=True)
    assert as_text(graph(PRODUCTS, weight)).splitlines()[1:6] == [
        f"_0 = DequantizeLinear<axis=1, block_size={BLOCK}>(q.codes, q.scales, q.zeros_4)",
        "_1 = Gather<axis=1>(_0, q.places)",
        "_2 = Mul(_1, q.factors)",
        "_3 = Transpose<perm=(1, 0)>(_2)",
        "a = MatMul(x, _3)",
    ]


def test_an_x_of_fp8_is_rounded_once() -> None:
    weight = replace(float_codes("float32"), x_scale=np.asarray(0.5, np.float32))
    assert (
        as_text(graph(FLOATS, weight))
        == f"""
_0 = DequantizeLinear<axis=1, block_size={K}>(q.codes, q.scales)
_1 = QuantizeLinear(x, x.scale_0, zero_e4m3)
_2 = DequantizeLinear(_1, x.scale_0, zero_e4m3)
_3 = Transpose<perm=(1, 0)>(_0)
a = MatMul(_2, _3)
_5 = DequantizeLinear<axis=1, block_size={K}>(k.codes, k.scales)
b = Gemm<transB=1>(_2, _5, bias)
y = Add(a, b)
"""
    )


def test_onnx_runtime_multiplies_by_codes() -> None:
    model = graph(FLOATS, random_codes(4, "float32"))
    MultiplyCodes("fast")(model)
    form = f"K={K}, N={N}, accuracy_level=4, bits=4, block_size={BLOCK}"
    assert (
        as_text(model)
        == f"""
_0 = MatMulNBits<{form}>(x, q.codes, q.scales, q.zeros_4)
_1 = MatMulNBits<{form}>(x, k.codes, k.scales, k.zeros_4)
_2 = Add(_1, bias)
y = Add(_0, _2)
"""
    )


def test_onnx_runtime_multiplies_in_the_order_of_the_codes_by_what_has_their_factors() -> None:
    model = graph(PRODUCTS, random_codes(4, "float32", is_ordered=False, has_factors=True))
    MultiplyCodes("exact")(model)
    form = f"K={K}, N={N}, accuracy_level=1, bits=4, block_size={BLOCK}"
    assert (
        as_text(model)
        == f"""
_0 = Mul(x, x.mul_0)
_1 = Gather<axis=-1>(_0, _.gather_1)
_2 = MatMulNBits<{form}>(_1, q.codes, q.scales, q.zeros_4)
_3 = MatMulNBits<{form}>(_1, k.codes, k.scales, k.zeros_4)
y = Add(_2, _3)
"""
    )


def test_tensorrt_has_signed_codes_without_zeros_and_then_one_product() -> None:
    model = graph(PRODUCTS, four_bits())
    SignCodes()(model)
    decoded = f"DequantizeLinear<axis=1, block_size={BLOCK}>"
    assert (
        as_text(model)
        == f"""
_0 = {decoded}(q.signed.codes, q.signed.scales)
_1 = Transpose<perm=(1, 0)>(_0)
a = MatMul(x, _1)
_3 = {decoded}(k.signed.codes, k.signed.scales)
_4 = Transpose<perm=(1, 0)>(_3)
b = MatMul(x, _4)
y = Add(a, b)
"""
    )
    MultiplySideBySide()(model)
    assert (
        as_text(model)
        == f"""
_0 = {decoded}(a.codes, a.scales)
_1 = Transpose<perm=(1, 0)>(_0)
_2 = MatMul(x, _1)
_3, _4 = Split<axis=-1>(_2, a.widths)
y = Add(_3, _4)
"""
    )


@pytest.mark.parametrize("is_rounded", [False, True])
def test_tensorrt_has_a_scale_for_each_row_of_fp8(is_rounded: bool) -> None:
    x_scale = np.asarray(0.5, np.float32) if is_rounded else None
    model = graph(PRODUCTS, replace(float_codes("float32"), x_scale=x_scale))
    SignCodes()(model)
    MultiplySideBySide()(model)
    lines = [line.partition(" = ")[2] for line in as_text(model).splitlines()[1:]]
    rounding = [
        "QuantizeLinear(x, x.scale_0, zero_e4m3)",
        "DequantizeLinear(_0, x.scale_0, zero_e4m3)",
    ]
    assert [line for line in lines if line in rounding] == rounding * is_rounded
    assert "DequantizeLinear<axis=0>(a.codes, a.scales)" in lines
    assert sum(line.startswith("MatMul") for line in lines) == 1


def test_tensorrt_rounds_x_to_nvfp4_by_an_operator_of_its_own() -> None:
    model = graph(PRODUCTS, nvfp4_codes("float16"))
    block = f"axis=1, block_size={BLOCK}"
    assert as_text(model).splitlines()[1:7] == [
        "_0 = DequantizeLinear(q.fine_scales, q.unit)",
        "_1 = Cast<to=10>(_0)",
        f"_2 = DequantizeLinear<{block}>(q.codes, _1)",
        "_3 = RoundToNVFP4(x, x.unit_0)",
        "_4 = Transpose<perm=(1, 0)>(_2)",
        "a = MatMul(_3, _4)",
    ]
    SignCodes()(model)
    MultiplySideBySide()(model)
    assert not model.functions
    x_block = f"axis=-1, block_size={BLOCK}"
    assert (
        as_text(model)
        == f"""
_0, _1 = TRT_FP4DynamicQuantize<{x_block}, scale_type=17>(x, x.unit_0)
_2 = DequantizeLinear(_1, x.unit_0)
_3 = DequantizeLinear<{x_block}>(_0, _2)
_4 = DequantizeLinear(a.scales, q.signed.unit)
_5 = Cast<to=10>(_4)
_6 = DequantizeLinear<{block}>(a.codes, _5)
_7 = Transpose<perm=(1, 0)>(_6)
_8 = MatMul(_3, _7)
_9, _10 = Split<axis=-1>(_8, a.widths)
y = Add(_9, _10)
"""
    )


def test_weights_of_nvfp4_with_units_of_their_own_stay_apart() -> None:
    weight = nvfp4_codes("float16")
    fine, unit = gv.present(weight.parts)
    model = graph(PRODUCTS, weight, replace(weight, parts=(fine, 2 * unit)))
    SignCodes()(model)
    assert not MultiplySideBySide()(model).modified
