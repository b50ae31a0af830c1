"""Pass that leaves no attention which ONNX Runtime or TensorRT could not read.

1. A mask that is added to scores becomes the boolean one that it was made from, where only
   attention reads it so: TensorRT has a fused kernel for it.
2. Attention with a soft cap is written out in matrix products, since TensorRT has none.
3. Left alone is attention whose mask is another sum.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.lowering.attention_masks import boolean_mask

ATTENTION = "Attention"
SOFTCAP = "softcap"


class StandardAttention(ir.passes.InPlacePass):
    """The pass, for a graph as the exporter leaves it."""

    def requires(self, model: ir.Model) -> None:
        """Attention reads a mask; with a soft cap, heads and widths are numbers."""
        for node in require_masks(model):
            sizes = [gv.has_size(value, axis) for value in node.inputs[:3] for axis in (1, 3)]
            is_capped = node.attributes.get_float(SOFTCAP, 0.0) > 0
            gv.require(all(sizes) or not is_capped, "heads or widths of attention are unknown")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        for node in [node for node in model.graph if node.op_type == ATTENTION]:
            if node.attributes.get_float(SOFTCAP, 0.0):
                _write_out(node)
                continue
            node.attributes.pop(SOFTCAP, None)
            mask = node.inputs[3]
            if mask is not None and (seen := boolean_mask(mask)) is not None:
                node.replace_input_with(3, seen)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """No attention has a soft cap."""
        nodes = [node for node in model.graph if node.op_type == ATTENTION]
        gv.ensure(not any(SOFTCAP in node.attributes for node in nodes), "attention has a soft cap")


def require_masks(model: ir.Model) -> list[ir.Node]:
    """Return the attention of a graph; PreconditionError where one lacks query, key or mask."""
    nodes = [node for node in model.graph if node.op_type == ATTENTION]
    has_masks = all(len(node.inputs) >= 4 and None not in node.inputs[:4] for node in nodes)
    gv.require(has_masks, "attention lacks a mask")
    return nodes


def _write_out(node: ir.Node) -> None:
    """Replace attention by its definition, the query heads of a group folded into one length."""
    query, key, value, mask = (gv.present(operand) for operand in node.inputs)
    heads, groups = gv.size_of(query, 1), gv.size_of(key, 1)
    scale, cap = node.attributes["scale"].as_float(), node.attributes[SOFTCAP].as_float()
    tape, dtype = Tape(), gv.present(query.dtype)

    def scalar(number: float) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(np.array(number, dtype.numpy()))})

    def reshape(x: ir.Value, *shape: int) -> ir.Value:
        return tape.op("Reshape", [x, gv.constant(tape, shape)])

    folded = tape.op("Mul", [reshape(query, 0, groups, -1, gv.size_of(query, 3)), scalar(scale)])
    scores = tape.op("MatMul", [folded, tape.op("Transpose", [key], {"perm": [0, 1, 3, 2]})])
    capped = tape.op("Tanh", [tape.op("Div", [scores, scalar(cap)])])
    scores = tape.op("Mul", [capped, scalar(cap)])
    repeats = (1, 1, heads // groups, 1)
    tiled = tape.op("Tile", [mask, gv.constant(tape, repeats)]) if heads > groups else mask
    weights = tape.op("Softmax", [tape.op("Add", [scores, tiled])], {"axis": -1})
    attended = reshape(tape.op("MatMul", [weights, value]), 0, heads, -1, gv.size_of(value, 3))
    gv.replace_node(node, gv.unnamed(tape), attended)
