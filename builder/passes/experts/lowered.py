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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import EXPERTS_DOMAIN
from trt_lora.plugins.errors import ConfigError

EXPERTS = "Experts"
Form = Callable[[Tape], ir.Value]  # writes nodes and returns what they result in
Forms = Mapping[str, Form]
GATHERED_READS = 3  # weights that are gathered are read, written, and read again
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
            _write_out(node, at_a_time(node, self.tokens))
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


def at_a_time(node: ir.Node, tokens: int) -> int:
    """Return how many experts compute all tokens of a step at a time.

    Raises:
        ConfigError: one of them takes more memory than all may.
    """
    dtype = gv.present(_operand(node, 0).dtype)
    width = gv.size_of(_operand(node, 3), 1) // 2
    if (one := expert_bytes(tokens, width, int(dtype.itemsize))) > MOST_BYTES:
        raise ConfigError(
            f"an expert of width {width} takes {one:,} bytes for a prompt of {tokens} tokens, and "
            f"all may take {MOST_BYTES:,}; lower --max-input-len"
        )
    return MOST_BYTES // one


def are_few(tape: Tape, node: ir.Node, reads: int) -> ir.Value:
    """Return whether reading the weights of tokens' experts so often is less than all once."""
    experts, top = gv.size_of(_operand(node, 3), 0), gv.size_of(_operand(node, 1), 1)
    count = tape.op("Shape", [_operand(node, 0)], {"start": 0, "end": 1})
    few = gv.constant(tape, [experts // (reads * top)])
    return tape.op("Squeeze", [tape.op("LessOrEqual", [count, few])])


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
    tape = Tape()
    forms: Forms = {
        "gathered": functools.partial(_gathered, node=node),
        "dense": functools.partial(_dense, node=node, most=most),
    }
    result = either(
        tape, are_few(tape, node, GATHERED_READS), forms, str(node.outputs[0].name), node.outputs[0]
    )
    gv.replace_node(node, gv.unnamed(tape), result)


def either(tape: Tape, is_first: ir.Value, forms: Forms, label: str, like: ir.Value) -> ir.Value:
    """Return the value of one of two forms.

    Args:
        tape: takes the node.
        is_first: whether it is the first form's.
        forms: by name; each writes nodes and returns their result.
        label: begins the names of values in them; no name of a branch may be one of the graph.
        like: has the type and shape of the result.
    """
    keys = ("then_branch", "else_branch")
    branches = {
        key: _branch(name, write, f"{label}.{name}", like)
        for key, (name, write) in zip(keys, forms.items(), strict=True)
    }
    return tape.op("If", [is_first], branches)


def _branch(name: str, write: Form, label: str, like: ir.Value) -> ir.Graph:
    tape = Tape()
    result = write(tape)
    result.type, result.shape = like.type, like.shape
    outputs = [output for each in tape.nodes for output in each.outputs]
    for number, output in enumerate(outputs):
        output.name = f"{label}.{number}"
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
        of_part = functools.partial(part, tape, start=start, count=count)
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


def part(tape: Tape, value: ir.Value, *, start: int, count: int, axis: int = 0) -> ir.Value:
    """Return the slice `start:start + count` of an axis."""
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
