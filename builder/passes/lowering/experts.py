"""Passes that leave no node of experts, which no runtime has as the trace has it.

The node `Experts(x, chosen, shares, gate_up, down)` gives each token [h] the sum over its chosen
experts e of `share * down[e] (silu(gate) * up)`, where gate and up are the rows of `gate_up[e] x`.

1. `InterleaveExperts` puts the rows of gate and up in turns, as ONNX Runtime's operator reads them,
   so that both forms below share their weights.
2. `FuseExperts`, for ONNX Runtime: one `com.microsoft.MoE`. It reads the weights of chosen experts
   alone, where they lie. It chooses and shares out by itself, from logits: those are the
   logarithms of the shares, and nothing else is let in; what shares add up to is multiplied
   behind it.
3. `StandardExperts`, in standard operators: for few tokens the weights of their experts are
   gathered token by token; for more, all experts compute all tokens, as many experts at a time as
   `MOST_BYTES` have room for, and the shares of those that are not chosen are zero. Gathered
   weights are written and read again, three times their bytes in all: that is less than all
   experts' while 3 * tokens * top < E.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv

EXPERTS = "Experts"
EXPERTS_DOMAIN = "trt_lora.experts"
MOST_BYTES = 1 << 30  # that experts which compute all tokens take at a time

_OWN_DOMAIN = "com.microsoft"
_OWN_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
# Plain silu(gate) * up, as the operator spells it.
_SWIGLU: dict[str, str | int | float] = {
    "activation_type": "swiglu",
    "swiglu_fusion": 1,
    "swiglu_limit": 1e30,
}
_SWIGLU |= {"activation_alpha": 1.0, "activation_beta": 0.0}


class InterleaveExperts(ir.passes.InPlacePass):
    """The first pass, for a graph as the exporter leaves it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace initializers in place; values are moved when they are read."""
        values = {gv.present(node.inputs[3]) for node in experts_of(model)}
        for value in values:
            value.const_value = _interleaved(gv.present(value.const_value))
        return ir.passes.PassResult(model, modified=bool(values))


class FuseExperts(ir.passes.InPlacePass):
    """The second pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; nodes of a dtype that the operator does not take stay."""
        nodes = [node for node in experts_of(model) if _operand(node, 0).dtype in _OWN_DTYPES]
        for node in nodes:
            _fuse(node)
        if nodes:
            model.graph.opset_imports[_OWN_DOMAIN] = 1
        return ir.passes.PassResult(model, modified=bool(nodes))


@dataclass(frozen=True)
class StandardExperts(ir.passes.InPlacePass):
    """The third pass, after which there are no experts."""

    tokens: int  # of a step, most; decides how many experts are computed at a time

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        nodes = [*experts_of(model)]
        for node in nodes:
            dtype = gv.present(_operand(node, 0).dtype)
            width = gv.size_of(_operand(node, 3), 1) // 2
            each = expert_bytes(self.tokens, width, int(dtype.itemsize))
            _write_out(node, max(MOST_BYTES // each, 1))
        model.graph.opset_imports.pop(EXPERTS_DOMAIN, None)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def ensures(self, model: ir.Model) -> None:
        """No node of experts is left."""
        gv.ensure(not any(experts_of(model)), "experts are left")


def experts_of(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of experts of a graph."""
    return (node for node in [*model.graph] if node.domain == EXPERTS_DOMAIN)


def expert_bytes(tokens: int, width: int, itemsize: int) -> int:
    """Return how much memory an expert takes that computes all tokens: gate, up, their product.

    Args:
        tokens: of a step, most.
        width: of the expert, i.
        itemsize: bytes of an activation.
    """
    return tokens * width * 3 * itemsize


def _operand(node: ir.Node, place: int) -> ir.Value:
    return gv.present(node.inputs[place])


def _interleaved(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Rows [E, 2i, h] of gate and up in turns."""

    def moved() -> ir.TensorProtocol:
        array = tensor.numpy()
        experts, rows, width = array.shape
        halves = array.reshape(experts, 2, rows // 2, width)
        return ir.tensor(np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape))

    return ir.LazyTensor(moved, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()))


def _fuse(node: ir.Node) -> None:
    x, chosen, shares, gate_up, down = (gv.present(operand) for operand in node.inputs)
    dtype, tape = gv.present(x.dtype).numpy(), Tape()
    least = np.finfo(dtype).tiny
    logits = tape.op("Log", [tape.op("Max", [shares, gv.constant(tape, dtype.type(least))])])
    low = gv.constant(tape, np.array(np.finfo(dtype).min / 2, dtype))
    logits = _spread(tape, node, low, logits)
    attributes = {**_SWIGLU, "k": gv.size_of(chosen, 1), "normalize_routing_weights": 1}
    operands = [x, logits, gate_up, None, down]
    mixed = tape.op("MoE", operands, attributes, domain=_OWN_DOMAIN)
    total = tape.op("ReduceSum", [shares, gv.constant(tape, [-1])], {"keepdims": 1})
    result = tape.op("Mul", [mixed, total])
    gv.replace_node(node, gv.unnamed(tape), result)


def _write_out(node: ir.Node, most: int) -> None:
    x, chosen = _operand(node, 0), _operand(node, 1)
    experts, top = gv.size_of(_operand(node, 3), 0), gv.size_of(chosen, 1)
    tape = Tape()
    count = tape.op("Shape", [x], {"start": 0, "end": 1})
    few = gv.constant(tape, [experts // (3 * top)])
    is_few = tape.op("Squeeze", [tape.op("LessOrEqual", [count, few])])
    branches = {
        "then_branch": _branch(node, "gathered", _gathered),
        "else_branch": _branch(node, "dense", functools.partial(_dense, most=most)),
    }
    result = tape.op("If", [is_few], branches)
    gv.replace_node(node, gv.unnamed(tape), result)


def _branch(node: ir.Node, name: str, write: Callable[[Tape, ir.Node], ir.Value]) -> ir.Graph:
    tape, whole = Tape(), node.outputs[0]
    result = write(tape, node)
    result.type, result.shape = whole.type, whole.shape
    outputs = [output for each in tape.nodes for output in each.outputs]
    for number, output in enumerate(outputs):  # no name of a branch may be one of the graph
        output.name = f"{whole.name}.{name}.{number}"
    return ir.Graph([], [result], nodes=tape.nodes, name=name)


def _gathered(tape: Tape, node: ir.Node) -> ir.Value:
    """Of each token the weights of its own experts."""
    x, chosen, shares, gate_up, down = (gv.present(operand) for operand in node.inputs)
    rows, top, width = gv.size_of(gate_up, 1), gv.size_of(chosen, 1), gv.size_of(gate_up, 2)
    weights = tape.op("Gather", [gate_up, chosen])  # [t, top, 2i, h]
    flat = tape.op("Reshape", [weights, gv.constant(tape, [-1, top * rows, width])])
    both = tape.op("MatMul", [flat, tape.op("Unsqueeze", [x, gv.constant(tape, [-1])])])
    product = _product(tape, both, top, rows // 2, shares)  # [t, top, i, 1]
    parts = tape.op("MatMul", [tape.op("Gather", [down, chosen]), product])  # [t, top, h, 1]
    total = tape.op("ReduceSum", [parts, gv.constant(tape, [1])], {"keepdims": 0})
    return tape.op("Squeeze", [total, gv.constant(tape, [-1])])


def _dense(tape: Tape, node: ir.Node, *, most: int) -> ir.Value:
    """Of all tokens all experts, `most` at a time."""
    x, _, shares, gate_up, down = (gv.present(operand) for operand in node.inputs)
    experts, rows, width = (gv.size_of(gate_up, axis) for axis in range(3))
    zero = gv.constant(tape, np.array(0, gv.present(x.dtype).numpy()))
    every = _spread(tape, node, zero, shares)  # [t, E]
    sums = []
    for start in range(0, experts, most):
        count = min(most, experts - start)
        of_part = functools.partial(_part, tape, start=start, count=count)
        up = of_part(gate_up) if count < experts else gate_up
        flat = tape.op("Reshape", [up, gv.constant(tape, [count * rows, width])])
        both = tape.op("MatMul", [x, tape.op("Transpose", [flat], {"perm": [1, 0]})])
        own = of_part(every, axis=1) if count < experts else every
        product = _product(tape, both, count, rows // 2, own)
        acted = tape.op("Reshape", [product, gv.constant(tape, [-1, count * rows // 2])])
        back = of_part(down) if count < experts else down
        turned = tape.op("Transpose", [back], {"perm": [0, 2, 1]})
        flat = tape.op("Reshape", [turned, gv.constant(tape, [count * rows // 2, width])])
        sums.append(tape.op("MatMul", [acted, flat]))
    return functools.reduce(lambda one, other: tape.op("Add", [one, other]), sums)


def _part(tape: Tape, value: ir.Value, *, start: int, count: int, axis: int = 0) -> ir.Value:
    bounds = [gv.constant(tape, [each]) for each in (start, start + count, axis)]
    return tape.op("Slice", [value, *bounds])


def _product(tape: Tape, both: ir.Value, experts: int, width: int, shares: ir.Value) -> ir.Value:
    """silu(gate) * up * share [t, experts, width, 1], of gate and up in turns."""
    turns = tape.op("Reshape", [both, gv.constant(tape, [-1, experts, width, 2])])
    gate, up = tape.op_multi_out("Split", [turns], {"axis": -1, "num_outputs": 2}, num_outputs=2)
    acted = tape.op("Mul", [tape.op("Mul", [gate, tape.op("Sigmoid", [gate])]), up])
    return tape.op("Mul", [acted, tape.op("Unsqueeze", [shares, gv.constant(tape, [-2, -1])])])


def _spread(tape: Tape, node: ir.Node, empty: ir.Value, shares: ir.Value) -> ir.Value:
    """Values of the chosen experts [t, top] among `empty` for all others [t, E]."""
    count = tape.op("Shape", [_operand(node, 0)], {"start": 0, "end": 1})
    experts = gv.constant(tape, [gv.size_of(_operand(node, 3), 0)])
    every = tape.op("Expand", [empty, tape.op("Concat", [count, experts], {"axis": 0})])
    return tape.op("ScatterElements", [every, _operand(node, 1), shares], {"axis": 1})
