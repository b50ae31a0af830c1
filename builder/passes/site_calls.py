"""LoRA sites of an engine's ONNX graph: the linear, input and adapted output of each."""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import source_of
from trt_lora.plugins.contract.operators import DOMAIN, EXPERTS_OPERATOR, Operator, operator_named
from trt_lora.plugins.contract.sites import parse_binding
from trt_lora.plugins.errors import ModelError

_LINEARS = ("MatMul", "Gemm", "MatMulNBits")


@dataclass(frozen=True)
class SiteCall:
    """One call of one site; a module that the graph calls twice has two."""

    path: str
    linear: ir.Node  # the MatMul, Gemm or Conv whose output the delta is added to
    x: ir.Value  # the site's input [..., k]; of a convolution its patches
    result: ir.Value  # of its LoRA node [..., n]: the delta, or the addend with it
    addend: ir.Value | None  # of its LoRA node; None where that returns the delta itself
    output: ir.Value  # linear, bias, delta, and the residual where there is one
    residual: ir.Value | None = None  # what the graph adds together with the delta


def site_calls(model: ir.Model) -> Iterator[SiteCall]:
    """Yield every call of every site that is no matrix of experts, in the order of the graph.

    Raises:
        ModelError: a node of the domain is not as the insertion pass leaves it.
    """
    for node in model.graph:
        if node.domain != DOMAIN or node.op_type == EXPERTS_OPERATOR.name:
            continue  # experts have no linear
        operator = operator_named(node.op_type)
        if operator is None:
            raise ModelError(
                f"{node.op_type} is no operator of this release; build the engine again"
            )
        for index in range(operator.sites):
            yield _call(node, operator, index)


def _call(node: ir.Node, operator: Operator, index: int) -> SiteCall:
    path, x, result = _path(node, operator, index), gv.present(node.inputs[0]), node.outputs[index]
    addend = node.inputs[operator.addend(index)] if operator.has_addend else None
    if addend is not None and (linear := _linear(addend, x)):
        return SiteCall(path, linear, x, result, addend, output=result)
    for use in _behind_transpose(result).uses():
        other = use.node.inputs[1 - use.idx] if use.node.op_type == "Add" else None
        if other is not None and (linear := _linear(_before_lora(other), x)):
            return SiteCall(path, linear, x, result, addend, use.node.outputs[0], residual=addend)
    raise ModelError(f"the linear of {path} is not beside {node.name}; build the engine again")


def _behind_transpose(result: ir.Value) -> ir.Value:
    """A delta as it is added: that of a convolution gets its channels first."""
    uses = tuple(result.uses())
    if len(uses) == 1 and uses[0].node.op_type == "Transpose":
        return uses[0].node.outputs[0]
    return result


def _before_lora(value: ir.Value) -> ir.Value:
    """What a node adds to; two linears that are added are each the other's residual."""
    node = value.producer()
    operator = operator_named(node.op_type) if node is not None and node.domain == DOMAIN else None
    if node is None or operator is None or not operator.has_addend:
        return value
    return gv.present(node.inputs[operator.addend(gv.present(value.index()))])


def _path(node: ir.Node, operator: Operator, index: int) -> str:
    name = str(gv.present(node.inputs[operator.factors(index)[0]]).name)
    if parsed := parse_binding(name):
        return parsed[1]
    raise ModelError(f"{node.name} reads {name}, which is no LoRA input")


def _linear(value: ir.Value, x: ir.Value) -> ir.Node | None:
    """The linear that makes `value` from x, with or without a bias; None if nothing does."""
    node = value.producer()
    if node is not None and node.op_type == "Add":
        operands = [operand for operand in node.inputs if operand and operand.const_value is None]
        node = operands[0].producer() if len(operands) == 1 else None
    if node is not None and node.op_type == "Conv":  # its patches are of several nodes
        return node
    if node is None or node.op_type not in _LINEARS:
        return None
    x_of_node = source_of(gv.present(node.inputs[0]))
    return node if x_of_node is source_of(x) else None
