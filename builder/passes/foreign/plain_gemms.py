"""Pass that moves what a Gemm does to x in front of it, where a LoRA node reads x too.

1. `transA` becomes a Transpose of x.
2. `alpha`, which belongs to the weight, becomes a Mul of x: what is added to W is scaled alike.

`beta` is the bias's, and stays.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.foreign.weights import NoWeightError, product_weight


class PlainGemms(ir.passes.InPlacePass):
    """The pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place every Gemm of the main graph that has a constant weight."""
        found = [node for node in model.graph if node.op_type == "Gemm" and _has_weight(node)]
        changed = [node for node in found if _changes_x(node)]
        for node in changed:
            _move(node)
        return ir.passes.PassResult(model, modified=bool(changed))


def _has_weight(node: ir.Node) -> bool:
    try:
        return product_weight(node) is not None
    except NoWeightError:
        return False


def _changes_x(node: ir.Node) -> bool:
    attributes = node.attributes
    return attributes.get_float("alpha", 1.0) != 1 or bool(attributes.get_int("transA", 0))


def _move(node: ir.Node) -> None:
    tape, x = Tape(), gv.present(node.inputs[0])
    value, sizes = x, [*x.shape] if x.shape is not None else None
    if node.attributes.get_int("transA", 0):
        value = tape.op("Transpose", [value], {"perm": [1, 0]})
        sizes = sizes[::-1] if sizes else None
    if (alpha := node.attributes.get_float("alpha", 1.0)) != 1:
        dtype = gv.present(x.dtype or node.outputs[0].dtype).numpy()
        value = tape.op("Mul", [value, gv.constant(tape, np.array(alpha, dtype))])
    for each in tape.nodes:
        if each.op_type != "Constant":
            each.outputs[0].type = x.type
            each.outputs[0].shape = None if sizes is None else ir.Shape(sizes)
    gv.graph_of(node).insert_before(node, gv.unnamed(tape))
    node.replace_input_with(0, value)
    for name in ("alpha", "transA"):
        node.attributes.pop(name, None)
