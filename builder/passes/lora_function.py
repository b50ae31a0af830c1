"""ONNX function bodies of the LoRA operators, for runtimes without the plugin.

Those that take an adapter for each token compute for every site:

    t = x @ A            [slots, tokens, R], of every adapter
    t = t where the token's slot is the adapter's, else 0
    d = t @ B            t as [tokens, slots * R], B as [slots * R, n]

The tokens of other adapters are replaced and not multiplied by 0: one adapter's t may be infinite
on another's tokens. What they add to the sum is zero and exact. A token's bits do not depend on the
other tokens' adapters, nor on its own one's slot where R is a power of two: blocks of a matrix
product then hold whole adapters. They may depend on the shapes, as those of any matrix product.

That of experts gathers A and B for every token, as long as these take no more memory than those of
two tokens for each expert; for more tokens it does as above.
"""

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes.graph_values import constant
from trt_lora.plugins.contract.operators import COLUMNS, DOMAIN, Operator


def lora_function(operator: Operator, opset: int) -> ir.Function:
    """Return the model-local function of an operator, in opset `opset`."""
    inputs = [ir.val(name) for name in operator.input_names]
    pairs = [[inputs[index] for index in operator.factors(s)] for s in range(operator.sites)]
    tape, outputs = Tape(), []
    deltas = _deltas_of_slots if operator.has_slots else _deltas
    if operator.of_experts:
        deltas = _deltas_of_experts
    for site, delta in enumerate(deltas(tape, inputs, pairs)):
        if operator.has_addend:
            delta = tape.op("Add", [inputs[operator.addend(site)], delta])
        outputs.append(delta)
    for number, node in enumerate(tape.nodes):
        node.name = node.outputs[0].name = f"{node.op_type}_{number}"
    body = ir.Graph(
        inputs, outputs, nodes=tape.nodes, opset_imports={"": opset}, name=operator.name
    )
    # The body takes ranks as they are padded, and leaves its attribute unread.
    attributes = [ir.Attr(COLUMNS, ir.AttributeType.INTS, None)] if operator.has_slots else []
    return ir.Function(DOMAIN, operator.name, graph=body, attributes=attributes)


def taken_slots(tape: Tape, slot: ir.Value, rank: ir.Value) -> ir.Value:
    """Return whether a token takes an adapter [slots, tokens, 1].

    Args:
        tape: that takes the nodes.
        slot: of every token [tokens].
        rank: of the adapters [slots, sites].
    """
    count = tape.op("Squeeze", [tape.op("Shape", [rank], {"start": 0, "end": 1})])
    numbers = tape.op("Range", [constant(tape, 0), count, constant(tape, 1)])
    of_slots = tape.op("Reshape", [numbers, constant(tape, [-1, 1, 1])])
    wide = tape.op("Cast", [slot], {"to": ir.DataType.INT64})
    of_tokens = tape.op("Reshape", [wide, constant(tape, [-1, 1])])
    return tape.op("Equal", [of_tokens, of_slots])


def _deltas(tape: Tape, inputs: list[ir.Value], pairs: list[list[ir.Value]]) -> Iterator[ir.Value]:
    """(x @ A) @ B of every site."""
    for a, b in pairs:
        yield tape.op("MatMul", [tape.op("MatMul", [inputs[0], a]), b])


def _deltas_of_slots(
    tape: Tape, inputs: list[ir.Value], pairs: list[list[ir.Value]]
) -> Iterator[ir.Value]:
    """The same by each token's own adapter."""
    x, slot, rank = inputs[:3]
    rows = tape.op("Flatten", [x], {"axis": -1})  # [tokens, k]
    taken = taken_slots(tape, slot, rank)
    leading = tape.op("Shape", [x], {"end": -1})
    zero = tape.op("CastLike", [constant(tape, np.float32(0)), x])
    for a, b in pairs:
        t = tape.op("Where", [taken, tape.op("MatMul", [rows, a]), zero])
        beside = tape.op("Transpose", [t], {"perm": [1, 0, 2]})  # [tokens, slots, R]
        below = tape.op("Reshape", [b, _joined(tape, [-1], tape.op("Shape", [b], {"start": 2}))])
        product = tape.op("MatMul", [tape.op("Flatten", [beside], {"axis": 1}), below])
        yield tape.op("Reshape", [product, _joined(tape, leading, [-1])])  # [..., n]


def _deltas_of_experts(
    tape: Tape, inputs: list[ir.Value], pairs: list[list[ir.Value]]
) -> Iterator[ir.Value]:
    """The same where slots are many, and tokens of a step few."""
    slot, rank = inputs[1:3]
    count = tape.op("Shape", [rank], {"start": 0, "end": 1})
    most = tape.op("Mul", [count, constant(tape, [2])])
    is_few = tape.op("LessOrEqual", [tape.op("Shape", [slot]), most])
    branches = {
        "then_branch": _subgraph("few", _gathered, inputs, pairs),
        "else_branch": _subgraph("many", _deltas_of_slots, inputs, pairs),
    }
    yield tape.op("If", [tape.op("Squeeze", [is_few])], branches)


def _subgraph(
    name: str,
    write: Callable[[Tape, list[ir.Value], list[list[ir.Value]]], Iterator[ir.Value]],
    inputs: list[ir.Value],
    pairs: list[list[ir.Value]],
) -> ir.Graph:
    tape = Tape()
    (result,) = write(tape, inputs, pairs)
    for number, node in enumerate(tape.nodes):
        node.name = node.outputs[0].name = f"{name}_{node.op_type}_{number}"
    return ir.Graph([], [result], nodes=tape.nodes, name=name)


def _gathered(
    tape: Tape, inputs: list[ir.Value], pairs: list[list[ir.Value]]
) -> Iterator[ir.Value]:
    """A and B of its slot for every token, and 0 where that is none."""
    x, slot, rank = inputs[:3]
    wide = tape.op("Cast", [slot], {"to": ir.DataType.INT64})
    count = tape.op("Squeeze", [tape.op("Shape", [rank], {"start": 0, "end": 1})])
    last = tape.op("Sub", [count, constant(tape, 1)])
    place = tape.op("Min", [tape.op("Max", [wide, constant(tape, 0)]), last])
    is_taken = tape.op("Reshape", [tape.op("Equal", [wide, place]), constant(tape, [-1, 1, 1])])
    rows = tape.op("Unsqueeze", [tape.op("Flatten", [x], {"axis": -1}), constant(tape, [1])])
    zero = tape.op("CastLike", [constant(tape, np.float32(0)), x])
    leading = tape.op("Shape", [x], {"end": -1})
    for a, b in pairs:
        t = tape.op("MatMul", [rows, tape.op("Gather", [a, place])])  # [tokens, 1, R]
        d = tape.op("MatMul", [t, tape.op("Gather", [b, place])])
        own = tape.op("Where", [is_taken, d, zero])
        yield tape.op("Reshape", [own, _joined(tape, leading, [-1])])


def _joined(tape: Tape, *sizes: ir.Value | list[int]) -> ir.Value:
    """One shape of several parts."""
    parts = [constant(tape, part) if isinstance(part, list) else part for part in sizes]
    return tape.op("Concat", parts, {"axis": 0})
