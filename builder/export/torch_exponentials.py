"""Exponentials of constants, as torch computes them.

Frequencies of time steps are exponentials, and Flux multiplies them by thousands: where the
exporter's folding is a last bit off, as it is for 55 of 128, phases are off by 1e-4.
"""

import onnx_ir as ir
import torch

from trt_lora.builder.passes import graph_values as gv

EXPONENTIAL = "Exp"


def fold_exponentials(graph: ir.Graph) -> None:
    """Replace every exponential of a constant by its values, in place."""
    for node in list(graph):
        x = node.inputs[0] if node.op_type == EXPONENTIAL else None
        tensor = None if x is None else ir.convenience.get_const_tensor(x)
        if tensor is not None:
            values = torch.exp(torch.from_numpy(tensor.numpy().copy())).numpy()
            constant = ir.node("Constant", [], {"value": ir.tensor(values)})
            gv.replace_node(node, [constant], constant.outputs[0])
