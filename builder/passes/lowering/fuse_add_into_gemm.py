"""Pass that fuses an addition to a matrix product into it (`Gemm`), as ONNX Runtime runs it.

1. The functions of LoRA nodes are inlined, so that their products and additions take part.
2. `MatMul(a, b)` [m, n] that one `Add` alone reads becomes `Gemm(a, b, c)`, where the other operand
   c is [m, n] or [n]. Of two products the second is fused: the base model's is there with dummies.
3. Left alone are products of more dimensions or of unknown shape, with other readers, and additions
   that the graph returns.

ONNX Runtime would do so itself, but puts what it makes behind all else that it has in memory. In a
decode step everything is cold, and nodes that lie as they run bring the next ones along.
"""

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

from trt_lora.builder.passes import graph_values as gv
from trt_lora.plugins.contract.operators import DOMAIN


class FuseAddIntoGemm(ir.passes.InPlacePass):
    """The pass, for a graph of flat tokens [tokens, n]."""

    def requires(self, model: ir.Model) -> None:
        """Every LoRA node has the body that is inlined."""
        kinds = {node.op_identifier() for node in model.graph if node.domain == DOMAIN}
        gv.require(kinds <= model.functions.keys(), "LoRA nodes have no function body")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Inline all functions and rewrite in place."""
        inlined = InlinePass()(model).modified
        ShapeInferencePass()(model)  # of what was inside the functions
        sums = [node for node in model.graph if node.op_type == "Add" and not node.domain]
        made = [_is_absorbed(node) for node in sums]
        return ir.passes.PassResult(model, modified=inlined or any(made))

    def ensures(self, model: ir.Model) -> None:
        """No function is left, and no LoRA node."""
        gv.ensure(not model.functions, "a function is not inlined")
        gv.ensure(all(node.domain != DOMAIN for node in model.graph), "a LoRA node is not inlined")


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
    node = gv.present(product.producer())
    graph, gemm = gv.graph_of(node), ir.Node("", "Gemm", [*node.inputs, other])
    gv.replace_node(addition, [gemm], gemm.outputs[0])
    graph.remove(node, safe=True)
