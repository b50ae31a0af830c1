"""What passes ask of values, and how they make nodes and put them in the place of others."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.plugins.contract.operators import DOMAIN, operator_named

T = TypeVar("T")


def require(holds: bool, fault: str) -> None:
    """Raise PreconditionError with the fault of a graph that a pass cannot take."""
    if not holds:
        raise ir.passes.PreconditionError(fault)


def ensure(holds: bool, fault: str) -> None:
    """Raise PostconditionError with the fault of a graph that a pass has made."""
    if not holds:
        raise ir.passes.PostconditionError(fault)


def require_opset(model: ir.Model, least: int) -> None:
    """Raise PreconditionError where a graph's opset is below `least`."""
    opset = model.graph.opset_imports.get("", 0)
    require(opset >= least, f"the graph has opset {opset}, expected {least} or later")


def require_inputs(model: ir.Model, *names: str) -> None:
    """Raise PreconditionError where a graph lacks an input."""
    missing = set(names) - {value.name for value in model.graph.inputs}
    require(not missing, f"the graph has no input {', '.join(sorted(missing))}")


def graph_input(model: ir.Model, name: str) -> ir.Value:
    """Return an input of the graph, by its name."""
    return next(value for value in model.graph.inputs if value.name == name)


def present(thing: T | None) -> T:
    """Return an operand, a type or a shape that the exporter never leaves out."""
    assert thing is not None
    return thing


def has_size(value: ir.Value | None, axis: int) -> bool:
    """Whether a value has this axis, and its size is a number."""
    shape = None if value is None else value.shape
    return shape is not None and axis < len(shape) and isinstance(shape[axis], int)


def size_of(value: ir.Value, axis: int) -> int:
    """Return a size that is a number in every export: heads, widths, the length of a cache."""
    size = present(value.shape)[axis]
    assert isinstance(size, int)
    return size


def number(value: ir.Value | None) -> float | None:
    """Return the number that a value holds; None where it is not one number."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def factors(node: ir.Node) -> list[ir.Value]:
    """Return every A and B that a node reads, pair by pair; none where it is no LoRA node."""
    operator = operator_named(node.op_type) if node.domain == DOMAIN else None
    pairs = [operator.factors(site) for site in range(operator.sites)] if operator else []
    return [present(node.inputs[place]) for pair in pairs for place in pair]


def constant(tape: Tape, value: object) -> ir.Value:
    """Return a constant of the graph; whole numbers are int64."""
    array = np.asarray(value)
    dtype = np.int64 if array.dtype.kind == "i" else array.dtype
    return tape.op("Constant", [], {"value": ir.tensor(array.astype(dtype))})


def initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Return the initializer of a name, made of a tensor where there is none yet."""
    if name not in graph.initializers:
        value = ir.val(name, tensor.dtype, tensor.shape.numpy(), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def unnamed(tape: Tape) -> Sequence[ir.Node]:
    """Return the nodes of a tape; the graph that takes them names their outputs."""
    for node in tape.nodes:
        for output in node.outputs:
            output.name = None
    return tape.nodes


def graph_of(node: ir.Node) -> ir.Graph:
    """Return the main graph, in which a node is."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def insert_behind(graph: ir.Graph, value: ir.Value, nodes: ir.Node | Sequence[ir.Node]) -> None:
    """Put nodes behind what makes a value; of an input, before all others."""
    if (producer := value.producer()) is None:
        graph.insert_before(graph[0], nodes)
    else:
        graph.insert_after(producer, nodes)


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Make all that read `old`, or return it, read `new`; an output of the graph keeps its name."""
    if old.is_graph_output():
        new.name, old.name = old.name, new.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def replace_node(node: ir.Node, nodes: Sequence[ir.Node], result: ir.Value) -> None:
    """Put `nodes` in the place of `node`, and `result` in that of its first output."""
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    graph = graph_of(node)
    graph.insert_before(node, nodes)
    replace_value(node.outputs[0], result)
    graph.remove(node, safe=True)
