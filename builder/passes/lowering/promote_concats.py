"""Pass that gives the operands of every Concat one dtype, the widest, as `torch.cat` does.

The exporter leaves them as they are, which is no valid ONNX: SDXL joins float16 texts to what it
computes of sizes in float32.
"""

import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv


class PromoteConcats(ir.passes.InPlacePass):
    """The pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Cast in place."""
        mixed = [node for node in model.graph if node.op_type == "Concat" and _is_mixed(node)]
        for node in mixed:
            _promote(node)
        return ir.passes.PassResult(model, modified=bool(mixed))


def _dtypes(node: ir.Node) -> list[ir.DataType]:
    return [gv.present(gv.present(value).dtype) for value in node.inputs]


def _is_mixed(node: ir.Node) -> bool:
    return len({gv.present(value).dtype for value in node.inputs} - {None}) > 1


def _promote(node: ir.Node) -> None:
    tape, widest = Tape(), max(_dtypes(node), key=lambda dtype: dtype.bitwidth)
    for place, value in enumerate(node.inputs):
        if gv.present(value).dtype != widest:
            cast = tape.op("Cast", [value], {"to": widest})
            cast.type, cast.shape = ir.TensorType(widest), gv.present(value).shape
            node.replace_input_with(place, cast)
    node.outputs[0].type = ir.TensorType(widest)
    gv.graph_of(node).insert_before(node, gv.unnamed(tape))
