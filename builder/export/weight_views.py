"""Weights of a traced graph stay the model's own memory: transposed as views, and never folded."""

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from trt_lora.builder.passes import graph_values as gv


def weight_of(value: ir.Value | None) -> torch.Tensor | None:
    """Return the memory of a weight that has rows and columns; None where a value is none."""
    tensor = None if value is None else value.const_value
    raw = tensor.raw if isinstance(tensor, ir.Tensor) else None
    return raw if isinstance(raw, torch.Tensor) and raw.dim() == 2 else None


def reads_weight(node: ir.Node) -> bool:
    """Whether a node reads a weight that has rows and columns."""
    return any(weight_of(value) is not None for value in node.inputs)


def transpose_weights(graph: ir.Graph) -> None:
    """Put views in the place of Transpose nodes, in place; of weights that others read, too, none.

    A copy of each would be a second model in memory; a tied one would be a second time in the file.
    """
    for node in [node for node in graph if node.op_type == "Transpose" and reads_weight(node)]:
        value = gv.present(node.inputs[0])
        if list(node.attributes.get_ints("perm", (1, 0))) == [0, 1]:  # it moves nothing
            gv.replace_node(node, [], value)
        elif len(value.consumers()) == 1:
            name = f"{value.name}.transposed"
            weight = gv.present(weight_of(value))
            gv.replace_node(node, [], gv.initializer(graph, name, TorchTensor(weight.T, name)))
