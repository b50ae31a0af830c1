"""What reads weights that are codes: products, with x as they take it, and tied embeddings."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.coded_weight import E4M3, CodedWeight
from trt_lora.runtime.memory.dtypes import Array


def products_of(weight: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that multiply by a weight [n, k], those behind its Transpose too."""
    for node in weight.consumers():
        if node.op_type == "Transpose":
            yield from node.outputs[0].consumers()
        elif node.op_type != "Gather":
            yield node


def gathers_of(weight: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that read rows of a weight [n, k], such as a tied embedding."""
    for node in weight.consumers():
        if node.op_type == "Gather" and not node.attributes.get_int("axis", 0):
            yield node


@dataclass(frozen=True)
class CodedX:
    """What products read, as codes take it; those that share x, factors and order share it."""

    graph: ir.Graph
    made: dict[tuple[ir.Value, bytes], ir.Value] = field(default_factory=dict)

    def read(self, product: ir.Node, weight: CodedWeight) -> ir.Value:
        """Return x of a product, times the factors of its weight, in the order of its codes."""
        x = gv.present(product.inputs[0])
        if weight.factors is not None:
            x = self._changed(product, x, "Mul", weight.factors)
        if weight.order is not None:
            x = self._changed(product, x, "Gather", weight.order, axis=-1)
        return x

    def rounded(self, product: ir.Node, scale: Array) -> ir.Value:
        """Return x of a product, rounded to E4M3 times a scale; beyond 448 it is 448."""
        x = gv.present(product.inputs[0])
        key = x, scale.tobytes()
        if key not in self.made:
            tensors = {
                f"{x.name}.scale_{len(self.made)}": scale,
                "zero_e4m3": np.zeros((), E4M3),
            }
            operands = [
                gv.initializer(self.graph, name, ir.tensor(each)) for name, each in tensors.items()
            ]
            rounding = ir.node("QuantizeLinear", [x, *operands])
            node = ir.node("DequantizeLinear", [rounding.outputs[0], *operands])
            rounding.outputs[0].type = operands[1].type
            node.outputs[0].type = x.type
            rounding.outputs[0].shape = node.outputs[0].shape = x.shape
            self.graph.insert_before(product, [rounding, node])
            self.made[key] = node.outputs[0]
        return self.made[key]

    def _changed(
        self, product: ir.Node, x: ir.Value, operator: str, by: Array, **attributes: int
    ) -> ir.Value:
        key = x, by.tobytes()
        if key not in self.made:
            name = f"{x.name}.{operator.lower()}_{len(self.made)}"
            operands = [x, gv.initializer(self.graph, name, ir.tensor(by))]
            node = ir.node(operator, operands, attributes)
            node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
            self.graph.insert_before(product, node)
            self.made[key] = node.outputs[0]
        return self.made[key]
