"""Pass that states codes as TensorRT takes them: signed, without zeros.

1. Of 4 bits they become INT4 in the same blocks, of 8 bits INT8 with one scale a row; their zeros,
   the middle code everywhere, go. The bytes differ in the highest bit of each code.
2. Codes in another order than x has, or with factors of x, are multiplied by x in theirs and times
   those.
3. TensorRT wants scales above 0; one that is 0, also because its dtype has none so small, becomes
   1, and its codes 0.
4. Codes that are floats stay as they are, with one scale a row. NVFP4's become E2M1 with scales in
   blocks of 16, and x is rounded by TensorRT's own operator.
5. A MatMul of x [1, m, k], the output head's, is one of [m, k]: of a batch of one TensorRT first
   makes floats of the whole weight, in a kernel of their own.

https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
"""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes import nvfp4
from trt_lora.builder.passes.codes.coded_products import CodedX, products_of
from trt_lora.builder.passes.codes.coded_weight import (
    E4M3,
    CodedWeight,
    coded_values,
    coded_weights,
    decoding,
    packed,
    read_coded,
    write_scales,
)
from trt_lora.runtime.memory.dtypes import Array

_HIGHEST = {4: 0x88, 8: 0x80}  # bit of each code in a byte


def has_signed_form(weight: CodedWeight) -> bool:
    """Whether TensorRT multiplies by a weight's codes: their zeros are the middle code."""
    if weight.zeros is not None or (weight.scales < 0).any():
        return False
    return _is_blocked(weight) or bool((weight.scales == weight.scales[:, :1]).all())


def _is_blocked(weight: CodedWeight) -> bool:
    """Whether rows have several scales."""
    return weight.bits == 4 or weight.parts is not None


class SignCodes(ir.passes.InPlacePass):
    """The pass."""

    def requires(self, model: ir.Model) -> None:
        """Every weight in codes must have the form."""
        odd = [path for path, weight in coded_weights(model) if not has_signed_form(weight)]
        gv.require(not odd, f"codes of {', '.join(odd[:3])} have zeros, or several scales a row")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        coded_x, values = CodedX(model), list(coded_values(model))
        for path, value in values:
            _sign(model.graph, path, value, coded_x)
        nvfp4.round_by_tensorrt(model)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(values))


def _sign(graph: ir.Graph, path: str, value: ir.Value, coded_x: CodedX) -> None:
    weight, old = gv.present(read_coded(value)), gv.present(decoding(value))
    for product in list(products_of(value)):
        product.replace_input_with(0, coded_x.read(product, weight))
        _unbatch(product)
    scales, makers = _scales(graph, f"{path}.signed", weight)
    codes = gv.initializer(graph, f"{path}.signed.codes", _signed_codes(weight))
    blocks = {"axis": 1, "block_size": weight.block} if _is_blocked(weight) else {"axis": 0}
    node = ir.node("DequantizeLinear", [codes, scales], blocks)
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    graph.insert_before(old, [*makers, node])
    ir.convenience.replace_all_uses_with(value, node.outputs[0])


def _unbatch(product: ir.Node) -> None:
    x = gv.present(product.inputs[0])
    if product.op_type != "MatMul" or x.shape is None or len(x.shape) != 3 or x.shape[0] != 1:
        return
    axis = gv.initializer(gv.graph_of(product), "axis_0", ir.tensor(np.zeros(1, np.int64)))
    flat = ir.node("Squeeze", [x, axis])
    flat.outputs[0].type, flat.outputs[0].shape = x.type, ir.Shape(x.shape[1:])
    made = ir.node("MatMul", [flat.outputs[0], product.inputs[1]])
    back = ir.node("Unsqueeze", [made.outputs[0], axis])
    gv.replace_node(product, [flat, made, back], back.outputs[0])


def _signed_codes(weight: CodedWeight) -> ir.TensorProtocol:
    """Codes [n, k]."""
    codes = np.bitwise_xor(weight.codes, 0 if weight.is_float else _HIGHEST[weight.bits])
    codes.reshape(*weight.scales.shape, -1)[weight.scales == 0] = 0
    if weight.parts is not None:
        nibbles = codes.view(E4M3).astype(nvfp4.E2M1).view(np.uint8)
        return ir.PackedTensor(packed(nibbles), ir.DataType.FLOAT4E2M1, shape=weight.shape)
    if weight.bits == 8:
        return ir.tensor(codes.view(E4M3 if weight.is_float else np.int8))
    return ir.PackedTensor(codes.reshape(-1), ir.DataType.INT4, shape=weight.shape)


def _scales(graph: ir.Graph, prefix: str, weight: CodedWeight) -> tuple[ir.Value, list[ir.Node]]:
    """Scales above 0 [n, k / block], of one a row [n], and the nodes that make them."""
    parts, scales = weight.parts, _above_zero(weight.scales)
    if parts is not None:
        parts = _above_zero(parts[0]), parts[1]
    scales = scales if _is_blocked(weight) else np.ascontiguousarray(scales[:, 0])
    return write_scales(graph, prefix, replace(weight, scales=scales, parts=parts))


def _above_zero(scales: Array) -> Array:
    return np.where(scales == 0, np.ones_like(scales), scales)
