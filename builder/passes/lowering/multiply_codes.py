"""Pass that multiplies by codes themselves (`MatMulNBits`), as ONNX Runtime does it fast.

1. `x @ Transpose(DequantizeLinear(codes, scales, zeros))` becomes one node, which reads the same
   bytes: codes as [n, blocks, bytes of a block], zeros two in a byte and row by row.
2. A Gemm's sum is an Add behind it.
3. Codes in another order than x has, or with factors of x, are multiplied by x in theirs and times
   those; linears that share them share the Gather and the Mul.
4. Left alone is a weight with another reader, a Gemm that scales its product or its sum, and codes
   that are floats.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_products import CodedX, gathers_of, products_of
from trt_lora.builder.passes.codes.coded_weight import (
    CodedWeight,
    Codes,
    coded_values,
    decoding,
    packed,
    read_coded,
)
from trt_lora.builder.passes.lowering.grouped_query_attention import DOMAIN

# ONNX Runtime's accuracy levels: x as it is, or rounded to 8 bits block by block.
LEVELS = {"exact": 1, "fast": 4}
ROWS = ".rows"  # behind the name of codes [n, blocks, ..], of the same bytes as [n, ..]


@dataclass(frozen=True)
class MultiplyCodes(ir.passes.InPlacePass):
    """The pass."""

    level: str  # one of LEVELS

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        coded_x = CodedX(model)
        made = [self._multiply(value, coded_x) for _, value in list(coded_values(model))]
        if any(made):
            RemoveUnusedNodesPass()(model)
            model.graph.opset_imports[DOMAIN] = 1
        return ir.passes.PassResult(model, modified=any(made))

    def _multiply(self, value: ir.Value, coded_x: CodedX) -> bool:
        weight, products = gv.present(read_coded(value)), list(products_of(value))
        if weight.is_float or not all(map(_is_plain, products)):
            return False
        operands, (n, k) = _operands(gv.present(decoding(value)), weight), weight.shape
        for node in list(gathers_of(value)):
            _gather(node, operands, weight)
        attributes = {"N": n, "K": k, "bits": weight.bits, "block_size": weight.block}
        attributes["accuracy_level"] = LEVELS[self.level]
        for product in products:
            read = [coded_x.read(product, weight), *operands]
            made = [ir.node("MatMulNBits", read, attributes, domain=DOMAIN)]
            y = made[0].outputs[0]
            y.type, y.shape = product.outputs[0].type, product.outputs[0].shape
            if len(product.inputs) > 2:
                made.append(ir.node("Add", [y, product.inputs[2]]))
            gv.replace_node(product, made, made[-1].outputs[0])
        return True


def _gather(node: ir.Node, operands: Sequence[ir.Value], weight: CodedWeight) -> None:
    """Let an embedding make floats of the rows that it reads, of bytes that products read, too."""
    codes, *others = operands
    rows = ir.tensor(weight.codes)
    read = [gv.initializer(gv.graph_of(node), f"{codes.name}{ROWS}", rows), node.inputs[1], *others]
    attributes = {"bits": weight.bits, "block_size": weight.block, "quantize_axis": 1}
    made = ir.node("GatherBlockQuantized", read, attributes, domain=DOMAIN)
    gv.replace_node(node, [made], made.outputs[0])


def _is_plain(node: ir.Node) -> bool:
    if node.op_type == "MatMul":
        return True
    factors = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    return node.op_type == "Gemm" and all(factor == 1 for factor in factors)


def _operands(node: ir.Node, weight: CodedWeight) -> list[ir.Value]:
    """The weight's values as the operator takes them, in the place of what `node` has read."""
    codes, scales, zeros = map(gv.present, node.inputs)
    _hold(codes, weight.codes.reshape(*weight.scales.shape, -1))
    if weight.zeros is None:
        return [codes, scales]
    _hold(zeros, packed(weight.zeros) if weight.bits == 4 else weight.zeros)
    return [codes, scales, zeros]


def _hold(value: ir.Value, codes: Codes) -> None:
    value.const_value = ir.tensor(codes, name=value.name)
    value.dtype, value.shape = ir.DataType.UINT8, ir.Shape(codes.shape)
