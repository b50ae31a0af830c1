"""What reads weights that are codes: products, with x as they take it, and tied embeddings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes import nvfp4
from trt_lora.builder.passes.codes.coded_weight import E4M3, CodedWeight
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
    """What products read, as codes take it; those that share x and how it changes share it."""

    model: ir.Model
    made: dict[tuple[ir.Value, str, bytes], ir.Value] = field(default_factory=dict)

    def read(self, product: ir.Node, weight: CodedWeight) -> ir.Value:
        """Return x of a product, times the factors of its weight, in the order of its codes."""
        x = gv.present(product.inputs[0])
        if weight.factors is not None:
            x = self._changed(product, x, "mul", weight.factors)
        if weight.order is not None:
            x = self._changed(product, x, "gather", weight.order)
        return x

    def rounded(self, product: ir.Node, weight: CodedWeight) -> ir.Value:
        """Return x of a product, rounded to codes like the weight's, by its scale of x."""
        how = "unit" if weight.parts is not None else "scale" if weight.is_float else "step"
        return self._changed(
            product, gv.present(product.inputs[0]), how, gv.present(weight.x_scale)
        )

    def _changed(self, product: ir.Node, x: ir.Value, how: str, by: Array) -> ir.Value:
        key = x, how, by.tobytes()
        if key not in self.made:
            graph, name = self.model.graph, f"{x.name}.{how}_{len(self.made)}"
            nodes = _CHANGES[how](self.model, x, gv.initializer(graph, name, ir.tensor(by)))
            result = nodes[-1].outputs[0]
            result.type, result.shape = x.type, x.shape
            graph.insert_before(product, nodes)
            self.made[key] = result
        return self.made[key]


def _rounded(model: ir.Model, x: ir.Value, scale: ir.Value, zero: Array) -> list[ir.Node]:
    """X as codes of zero's dtype and back; beyond the largest code it is that."""
    name = f"zero_{'e4m3' if zero.dtype == E4M3 else zero.dtype.name}"
    point = gv.initializer(model.graph, name, ir.tensor(zero))
    codes = ir.node("QuantizeLinear", [x, scale, point])
    codes.outputs[0].type, codes.outputs[0].shape = point.type, x.shape
    return [codes, ir.node("DequantizeLinear", [codes.outputs[0], scale, point])]


_CHANGES: Mapping[str, Callable[[ir.Model, ir.Value, ir.Value], list[ir.Node]]] = {
    "mul": lambda _, x, factors: [ir.node("Mul", [x, factors])],
    "gather": lambda _, x, order: [ir.node("Gather", [x, order], {"axis": -1})],
    "scale": lambda model, x, scale: _rounded(model, x, scale, np.zeros((), E4M3)),
    "step": lambda model, x, step: _rounded(model, x, step, np.zeros((), np.int8)),
    "unit": lambda model, x, unit: [nvfp4.rounding(model, x, unit)],
}
