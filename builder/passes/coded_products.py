"""What reads weights that are codes: products, with x in their order, and tied embeddings."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.coded_weight import CodedWeight


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
class Reordered:
    """What products read, in the order of their codes; those that share x and order share it."""

    graph: ir.Graph
    made: dict[tuple[ir.Value, bytes], ir.Value] = field(default_factory=dict)

    def read(self, product: ir.Node, weight: CodedWeight) -> ir.Value:
        """Return x of a product, in the order of the codes of its weight."""
        x = gv.present(product.inputs[0])
        if weight.order is None:
            return x
        key = x, weight.order.tobytes()
        if key not in self.made:
            name, places = f"{x.name}.order_{len(self.made)}", ir.tensor(weight.order)
            order = gv.initializer(self.graph, name, places)
            node = ir.node("Gather", [x, order], {"axis": -1})
            node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
            self.graph.insert_before(product, node)
            self.made[key] = node.outputs[0]
        return self.made[key]
