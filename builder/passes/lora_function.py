"""ONNX function bodies of the LoRA operators, for runtimes without the plugin."""

import onnx_ir as ir

from trt_lora.builder.passes.slots.slots_function import slots_function
from trt_lora.plugins.contract.operators import DOMAIN, Operator


def lora_function(operator: Operator, opset: int) -> ir.Function:
    """Return the model-local function of an operator, in opset `opset`."""
    if operator.has_slots:
        return slots_function(operator, opset)
    inputs = [ir.val(name) for name in _input_names(operator)]
    nodes: list[ir.Node] = []
    outputs: list[ir.Value] = []
    for site in range(operator.sites):
        a, b = (inputs[index] for index in operator.factors(site))
        nodes += _delta(inputs[0], a, b, site)
        if operator.has_addend:
            addend = inputs[operator.addend(site)]
            nodes.append(_node("Add", addend, nodes[-1].outputs[0], f"z_{site}"))
        outputs.append(nodes[-1].outputs[0])
    imports = {"": opset}
    body = ir.Graph(inputs, outputs, nodes=nodes, opset_imports=imports, name=operator.name)
    return ir.Function(DOMAIN, operator.name, graph=body, attributes=())


def _input_names(operator: Operator) -> list[str]:
    names = {0: "x"}
    for site in range(operator.sites):
        names |= dict(zip(operator.factors(site), (f"A_{site}", f"B_{site}"), strict=True))
        if operator.has_addend:
            names[operator.addend(site)] = f"c_{site}"
    return [names[index] for index in range(operator.inputs)]


def _delta(x: ir.Value, a: ir.Value, b: ir.Value, site: int) -> list[ir.Node]:
    shrink = _node("MatMul", x, a, f"t_{site}")
    return [shrink, _node("MatMul", shrink.outputs[0], b, f"d_{site}")]


def _node(kind: str, left: ir.Value, right: ir.Value, name: str) -> ir.Node:
    node = ir.node(kind, [left, right])
    node.name = node.outputs[0].name = name
    return node
