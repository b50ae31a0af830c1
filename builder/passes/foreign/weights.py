"""Weights of matrix products, seen through what exporters put between the two.

| between weight and product | W is |
|---|---|
| Transpose, Reshape | in that shape |
| Cast, Identity | as it lies |
| DequantizeLinear | what its codes mean: int4, int8, float8, a scale a tensor, row or block |

A product is MatMul, Gemm, Conv, whose W has a row for every value that an output reads, or
`com.microsoft::MatMulNBits`, which reads codes itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.windows import Window, refusal

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class ProductWeight:
    """A constant matrix as a product reads it."""

    root: ir.Value  # what the graph stores of it: floats or codes
    shape: tuple[int, ...]
    dtype: ir.DataType  # of its floats
    window: Window | None = None  # of a convolution


class NoWeightError(ValueError):
    """Why an operand is no weight; it never leaves this folder."""


def product_weight(node: ir.Node) -> ProductWeight | None:
    """Return the weight [k, n] of a matrix product; None where the node is none.

    Raises:
        NoWeightError: it is one, and takes no LoRA; the message says why.
    """
    read = _PRODUCTS.get((node.domain, node.op_type))
    weight = read(node) if read else None
    if weight is not None and len(weight.shape) != 2:
        raise NoWeightError(f"its weight has {len(weight.shape)} dimensions, not 2")
    return weight


def _matmul(node: ir.Node) -> ProductWeight:
    return _read(node.inputs[1])


def _gemm(node: ir.Node) -> ProductWeight:
    weight = _read(node.inputs[1])
    is_turned = node.attributes.get_int("transB", 0)
    return replace(weight, shape=weight.shape[::-1]) if is_turned else weight


def _codes_product(node: ir.Node) -> ProductWeight:
    codes, scales = _read(node.inputs[1]), _read(node.inputs[2])
    shape = node.attributes["K"].as_int(), node.attributes["N"].as_int()
    return replace(codes, shape=shape, dtype=scales.dtype)


def _convolution(node: ir.Node) -> ProductWeight:
    if reason := refusal(node):
        raise NoWeightError(reason)
    weight = _read(node.inputs[1])
    n, channels, *kernel = weight.shape
    window = Window.of(node, tuple(kernel))
    return replace(weight, shape=(channels * window.taps, n), window=window)


_PRODUCTS: Mapping[tuple[str, str], Callable[[ir.Node], ProductWeight]] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Conv"): _convolution,
    (MICROSOFT, "MatMulNBits"): _codes_product,
}


def _read(value: ir.Value | None) -> ProductWeight:
    if value is None:
        raise NoWeightError("it has no weight")
    node = value.producer()
    if (tensor := ir.convenience.get_const_tensor(value)) is not None:
        if value.is_graph_input():
            raise NoWeightError("its weight is an input of the graph too, which a run may replace")
        return ProductWeight(value, tuple(tensor.shape.numpy()), tensor.dtype)
    change = _BETWEEN.get(node.op_type) if node is not None and node.domain == "" else None
    if node is None or change is None:
        raise NoWeightError("its second operand is not a constant weight")
    return change(node, _read(node.inputs[0]))


def _transposed(node: ir.Node, weight: ProductWeight) -> ProductWeight:
    axes = node.attributes.get_ints("perm", range(len(weight.shape))[::-1])
    return replace(weight, shape=tuple(weight.shape[axis] for axis in axes))


def _reshaped(node: ir.Node, weight: ProductWeight) -> ProductWeight:
    shape = node.outputs[0].shape
    if shape is None or shape.is_dynamic():
        raise NoWeightError("its weight is reshaped to sizes that a run computes")
    return replace(weight, shape=tuple(shape.numpy()))


def _cast(node: ir.Node, weight: ProductWeight) -> ProductWeight:
    return replace(weight, dtype=ir.DataType(node.attributes["to"].as_int()))


def _same(node: ir.Node, weight: ProductWeight) -> ProductWeight:
    return weight


def _dequantised(node: ir.Node, weight: ProductWeight) -> ProductWeight:
    return replace(weight, dtype=gv.present(_read(node.inputs[1]).dtype))


_BETWEEN: Mapping[str, Callable[[ir.Node, ProductWeight], ProductWeight]] = {
    "Transpose": _transposed,
    "Reshape": _reshaped,
    "Cast": _cast,
    "Identity": _same,
    "DequantizeLinear": _dequantised,
}
