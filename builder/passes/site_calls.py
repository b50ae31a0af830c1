"""LoRA sites of an engine's ONNX graph: the linear, input and adapted output of each."""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import behind_identity
from trt_lora.plugins.contract.operators import DOMAIN, Operator, operator_named
from trt_lora.plugins.contract.sites import parse_binding
from trt_lora.plugins.errors import ModelError

_LINEARS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class SiteCall:
    """One call of one site; a module that the graph calls twice has two."""

    path: str
    node: ir.Node  # of the domain trt_lora
    operator: Operator
    index: int  # of the site in its node
    linear: ir.Node  # the MatMul or Gemm whose output the delta is added to
    output: ir.Value  # linear, bias, delta, and the residual where there is one
    residual: ir.Value | None = None  # what the graph adds together with the delta

    @property
    def x(self) -> ir.Value:
        """The site's input [..., k]."""
        return gv.present(self.node.inputs[0])

    @property
    def result(self) -> ir.Value:
        """The output of its node [..., n]: the delta, or the addend with it."""
        return self.node.outputs[self.index]

    @property
    def addend(self) -> ir.Value | None:
        """The addend of its node; None where the node returns the delta itself."""
        if not self.operator.has_addend:
            return None
        return self.node.inputs[self.operator.addend(self.index)]


def site_calls(model: ir.Model) -> Iterator[SiteCall]:
    """Yield every call of every site, in the order of the graph.

    Raises:
        ModelError: a node of the domain is not as the insertion pass leaves it.
    """
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        operator = operator_named(node.op_type)
        if operator is None:
            raise ModelError(
                f"{node.op_type} is no operator of this release; build the engine again"
            )
        for index in range(operator.sites):
            yield _call(node, operator, index)


def _call(node: ir.Node, operator: Operator, index: int) -> SiteCall:
    path, result = _path(node, operator, index), node.outputs[index]
    addend = node.inputs[operator.addend(index)] if operator.has_addend else None
    if addend is not None and (linear := _linear(addend, gv.present(node.inputs[0]))):
        return SiteCall(path, node, operator, index, linear, result)
    for use in result.uses():
        other = use.node.inputs[1 - use.idx] if use.node.op_type == "Add" else None
        if other is not None and (linear := _linear(other, gv.present(node.inputs[0]))):
            output = use.node.outputs[0]
            return SiteCall(path, node, operator, index, linear, output, addend)
    raise ModelError(f"the linear of {path} is not beside {node.name}; build the engine again")


def _path(node: ir.Node, operator: Operator, index: int) -> str:
    names = [gv.present(node.inputs[place]).name for place in operator.factors(index)]
    for name in names:
        if parsed := parse_binding(str(name)):
            return parsed[1]
    raise ModelError(f"{node.name} reads {names[0]}, which is no LoRA input")


def _linear(value: ir.Value, x: ir.Value) -> ir.Node | None:
    """The linear that makes `value` from x, with or without a bias; None if nothing does."""
    node = value.producer()
    if node is not None and node.op_type == "Add":
        operands = [operand for operand in node.inputs if operand and operand.const_value is None]
        node = operands[0].producer() if len(operands) == 1 else None
    if node is None or node.op_type not in _LINEARS:
        return None
    x_of_node = behind_identity(gv.present(node.inputs[0]))
    return node if x_of_node is behind_identity(x) else None
