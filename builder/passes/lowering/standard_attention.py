"""Pass that leaves no attention which ONNX Runtime or TensorRT could not read.

1. A mask that is added to scores becomes the boolean one that it was made from, where only
   attention reads it so: TensorRT has a fused kernel for it.
2. Attention with a soft cap is written out in matrix products, since TensorRT has none.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from trt_lora.builder.passes.lowering.attention_masks import boolean_mask

ATTENTION = "Attention"
SOFTCAP = "softcap"


class StandardAttention(ir.passes.InPlacePass):
    """The pass, for a graph as the exporter leaves it."""

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
        if any(node.op_type == ATTENTION and SOFTCAP in node.attributes for node in model.graph):
            raise ir.passes.PostconditionError("attention has a soft cap")


def _write_out(node: ir.Node) -> None:
    """Replace attention by its definition, the query heads of a group folded into one length."""
    query, key, value, mask = (_present(operand) for operand in node.inputs)
    heads, groups = _size(query, 1), _size(key, 1)
    scale, cap = node.attributes["scale"].as_float(), node.attributes[SOFTCAP].as_float()
    tape, dtype = Tape(), query.dtype
    assert dtype is not None  # the exporter writes the type of every value

    def scalar(number: float) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(np.array(number, dtype.numpy()))})

    def reshape(x: ir.Value, *shape: int) -> ir.Value:
        return tape.op("Reshape", [x, _integers(tape, shape)])

    folded = tape.op("Mul", [reshape(query, 0, groups, -1, _size(query, 3)), scalar(scale)])
    scores = tape.op("MatMul", [folded, tape.op("Transpose", [key], {"perm": [0, 1, 3, 2]})])
    capped = tape.op("Tanh", [tape.op("Div", [scores, scalar(cap)])])
    scores = tape.op("Mul", [capped, scalar(cap)])
    repeats = (1, 1, heads // groups, 1)
    tiled = tape.op("Tile", [mask, _integers(tape, repeats)]) if heads > groups else mask
    weights = tape.op("Softmax", [tape.op("Add", [scores, tiled])], {"axis": -1})
    attended = reshape(tape.op("MatMul", [weights, value]), 0, heads, -1, _size(value, 3))
    replace_node(node, tape.nodes, attended)


def replace_node(node: ir.Node, nodes: Sequence[ir.Node], result: ir.Value) -> None:
    """Put `nodes` in the place of `node`, and `result` in that of its first output."""
    for new in nodes:
        for output in new.outputs:
            output.name = None  # the graph gives it one of its own
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    graph.insert_before(node, nodes)
    ir.convenience.replace_all_uses_with(node.outputs[0], result)
    graph.remove(node, safe=True)


def _integers(tape: Tape, numbers: Sequence[int]) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(np.array(numbers, np.int64))})


def _present(value: ir.Value | None) -> ir.Value:
    assert value is not None  # the exporter writes query, key, value and mask
    return value


def _size(value: ir.Value, axis: int) -> int:
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)  # heads and widths are numbers
    return size
