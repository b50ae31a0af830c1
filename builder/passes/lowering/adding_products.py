"""Pass that writes an addition to a matrix product as part of it (`Gemm`), as ONNX Runtime runs it.

ONNX Runtime would do so itself, but puts what it makes behind all else that it has in memory. In a
decode step everything is cold, and nodes that lie as they run bring the next ones along.
"""

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

from trt_lora.builder.passes.lowering.standard_attention import replace_node


class AddingProducts(ir.passes.InPlacePass):
    """The pass, for a graph of flat tokens [tokens, n]; the bodies of LoRA nodes take part."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Inline all functions and rewrite in place."""
        inlined = InlinePass()(model).modified
        ShapeInferencePass()(model)  # of what was inside the functions
        sums = [node for node in model.graph if node.op_type == "Add" and not node.domain]
        made = [_is_absorbed(node) for node in sums]
        return ir.passes.PassResult(model, modified=inlined or any(made))


def _is_absorbed(addition: ir.Node) -> bool:
    """Make the addition part of one of its operands, if that is a product."""
    if addition.outputs[0].is_graph_output():
        return False
    for place in (1, 0):  # of two products the second: the base model's is there with dummies, too
        product, other = addition.inputs[place], addition.inputs[1 - place]
        if product is not None and other is not None and _takes(product, other):
            _absorb(addition, product, other)
            return True
    return False


def _takes(product: ir.Value, other: ir.Value) -> bool:
    """Whether `product` is one of matrices, for the addition alone, and `other` fits into it."""
    node, shape = product.producer(), product.shape
    if node is None or node.op_type != "MatMul" or node.domain or len(product.uses()) != 1:
        return False
    if shape is None or len(shape) != 2 or other.shape is None:
        return False
    return tuple(other.shape) in (tuple(shape), tuple(shape)[1:])


def _absorb(addition: ir.Node, product: ir.Value, other: ir.Value) -> None:
    node = product.producer()
    assert node is not None  # `_takes` has looked
    assert isinstance(node.graph, ir.Graph)
    graph, gemm = node.graph, ir.node("Gemm", [*node.inputs, other])
    replace_node(addition, [gemm], gemm.outputs[0])
    graph.remove(node, safe=True)
