"""Pass that rounds quotients of negated sizes down, as torch does.

The exporter writes torch's `//` as Div, which rounds towards zero in ONNX: SD3 crops its table of
places by -height // 2, and would be one row off at every odd height.
"""

import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv


class FloorDivisions(ir.passes.InPlacePass):
    """The pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Take the rest, which has the divisor's sign, from what is divided; in place."""
        found = [node for node in model.graph if node.op_type == "Div" and _is_negated(node)]
        for node in found:
            tape, (size, divisor) = Tape(), (gv.present(value) for value in node.inputs)
            whole = tape.op("Sub", [size, tape.op("Mod", [size, divisor])])
            node.replace_input_with(0, whole)
            gv.graph_of(node).insert_before(node, gv.unnamed(tape))
        return ir.passes.PassResult(model, modified=bool(found))


def _is_negated(node: ir.Node) -> bool:
    """Whether it divides a whole number that was multiplied by a negative one."""
    size, divisor = (gv.present(value) for value in node.inputs)
    product, tensor = size.producer(), divisor.const_value
    if tensor is None or tensor.dtype != ir.DataType.INT64:
        return False
    if product is None or product.op_type != "Mul":
        return False
    return any((factor := gv.number(value)) is not None and factor < 0 for value in product.inputs)
