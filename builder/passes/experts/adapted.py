"""Pass that lowers the nodes of experts that take LoRA.

1. A row is what one expert gets of one token: `top` rows a token. Rows know their expert, so one
   `LoraExpertsDelta1` adds the deltas of gate_up to all rows, and another those of down.
2. The products with weights are those of `StandardExperts`: gathered for few tokens, of all experts
   for more. The second add up what is not chosen as zeros, and pick what is. For ONNX Runtime
   both are loops (`looped.py`).
3. Shares are multiplied before down, which is linear.

No operator of ONNX Runtime has a place for a delta of gate_up, before the activation.
"""

import functools
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.experts.inputs import OPERANDS
from trt_lora.builder.passes.experts.looped import grouped, looped
from trt_lora.builder.passes.experts.lowered import (
    GATHERED_READS,
    Forms,
    are_few,
    at_a_time,
    either,
    experts_of,
    part,
)
from trt_lora.plugins.contract.operators import COLUMNS, DOMAIN, EXPERTS_OPERATOR
from trt_lora.plugins.contract.sites import MAX_RANK, parse_binding


@dataclass(frozen=True)
class AdaptExperts(ir.passes.InPlacePass):
    """The pass; nodes without LoRA stay."""

    tokens: int  # of a step, most; decides how many experts are computed at a time
    in_loops: bool = False  # for ONNX Runtime

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        nodes = [node for node in experts_of(model) if len(node.inputs) > OPERANDS]
        for node in nodes:
            _lower(node, at_a_time(node, self.tokens), in_loops=self.in_loops)
        return ir.passes.PassResult(model, modified=bool(nodes))


@dataclass(frozen=True)
class _Experts:
    """A node of experts, and where its lowered form is written."""

    node: ir.Node
    tape: Tape
    bounds: list[int]  # the experts that are computed at a time lie between two of them
    is_few: ir.Value  # whether the tokens are

    def label(self, place: int, form: str = "") -> str:
        """The beginning of names in a form of gate_up's product, or of down's."""
        return f"{self.node.outputs[0].name}.{('up', 'down')[place]}{form}"

    def operand(self, place: int) -> ir.Value:
        """x, chosen, shares, gate_up, down; A and B of each; slot and rank."""
        return gv.present(self.node.inputs[place])

    @property
    def top(self) -> int:
        """The number of experts of a token."""
        return gv.size_of(self.operand(1), 1)

    @property
    def width(self) -> int:
        """The width of an expert, i."""
        return gv.size_of(self.operand(4), 2)


def _lower(node: ir.Node, most: int, *, in_loops: bool) -> None:
    tape = Tape()
    count = gv.size_of(gv.present(node.inputs[3]), 0)
    is_few = are_few(tape, node, reads=1 if in_loops else GATHERED_READS)
    experts = _Experts(node, tape, [*range(0, count, most), count], is_few)
    x, shares, product = experts.operand(0), experts.operand(2), _in_loops if in_loops else _at_once
    alone = tape.op("Unsqueeze", [x, gv.constant(tape, [1])])
    spread = tape.op("Expand", [alone, gv.constant(tape, [1, experts.top, 1])])
    both = _with_delta(experts, 0, product(experts, 0, spread), spread)
    gate, up = tape.op_multi_out("Split", [both], {"axis": -1, "num_outputs": 2}, num_outputs=2)
    acted = tape.op("Mul", [tape.op("Mul", [gate, tape.op("Sigmoid", [gate])]), up])
    acted = tape.op("Mul", [acted, tape.op("Unsqueeze", [shares, gv.constant(tape, [-1])])])
    y = _with_delta(experts, 1, product(experts, 1, acted), acted)
    gv.replace_node(node, gv.unnamed(tape), y)


def _in_loops(experts: _Experts, place: int, rows: ir.Value) -> ir.Value:
    """Rows times gate_up [t, top, 2i], or the sum of those times down [t, h], by `looped.py`."""
    weights, chosen = experts.operand(3 + place), experts.operand(1)
    forms: Forms = {
        name: functools.partial(
            write, weights=weights, chosen=chosen, rows=rows, label=experts.label(place, name)
        )
        for name, write in (("looped", looped), ("grouped", grouped))
    }
    sizes = [None, experts.top, gv.size_of(weights, 1)]
    like = ir.val("", None, sizes, type=experts.operand(0).type)
    parts = either(experts.tape, experts.is_few, forms, experts.label(place), like)
    return _sum_of_experts(experts.tape, parts) if place else parts


def _at_once(experts: _Experts, place: int, rows: ir.Value) -> ir.Value:
    """The same in operators that TensorRT has."""
    few, many = ((_gathered_up, _dense_up), (_gathered_down, _dense_down))[place]
    forms: Forms = {
        "gathered": functools.partial(few, experts, rows),
        "dense": functools.partial(many, experts, rows),
    }
    like = experts.node.outputs[0]
    if not place:
        sizes = [None, experts.top, 2 * experts.width]
        like = ir.val("", None, sizes, type=experts.operand(0).type)
    return either(experts.tape, experts.is_few, forms, experts.label(place), like)


def _sum_of_experts(tape: Tape, parts: ir.Value) -> ir.Value:
    return tape.op("ReduceSum", [parts, gv.constant(tape, [1])], {"keepdims": 0})


def _with_delta(experts: _Experts, place: int, y: ir.Value, x: ir.Value) -> ir.Value:
    """Y with the delta of gate_up [t, top, 2i], or with the sum of those of down [t, h]."""
    node, tape, first = experts.node, experts.tape, OPERANDS + 2 * place
    if node.inputs[first] is None:
        return y
    (slot, rank), columns = _slots(experts), node.attributes.get_ints(COLUMNS, (0, 0))
    factors = [_stack(tape, experts.operand(number)) for number in (first, first + 1)]
    attributes = {COLUMNS: [columns[place]]}
    operands = [x, slot, rank, *factors]
    delta = tape.op(EXPERTS_OPERATOR.name, operands, attributes, domain=DOMAIN)
    binding = parse_binding(str(experts.operand(first).name))
    tape.nodes[-1].name = f"lora_{binding[1] if binding else place}"
    if place:
        delta = _sum_of_experts(tape, delta)
    return tape.op("Add", [y, delta])


def _slots(experts: _Experts) -> tuple[ir.Value, ir.Value]:
    """The slot of every row, its expert, and the ranks of all slots."""
    tape, chosen = experts.tape, experts.operand(1)
    number, count = tape.op("Cast", [chosen], {"to": ir.DataType.INT32}), experts.bounds[-1]
    if len(experts.node.inputs) == OPERANDS + 4:  # no adapter has a higher rank than the largest
        most = np.full((count, 1), MAX_RANK, np.int32)
        ranks = tape.op("Constant", [], {"value": ir.tensor(most)})
        return tape.op("Reshape", [number, gv.constant(tape, [-1])]), ranks
    # Of the base model, -1, all sums are below 0 too.
    each = tape.op("Constant", [], {"value": ir.tensor(np.array(count, np.int32))})
    first = tape.op("Mul", [experts.operand(OPERANDS + 4), each])
    place = tape.op("Add", [tape.op("Unsqueeze", [first, gv.constant(tape, [-1])]), number])
    return tape.op("Reshape", [place, gv.constant(tape, [-1])]), experts.operand(OPERANDS + 5)


def _stack(tape: Tape, factor: ir.Value) -> ir.Value:
    """A factor of experts [E, ..]; of slots [slots, E, ..] as [slots * E, ..]."""
    if len(gv.present(factor.shape)) == 3:
        return factor
    sizes = [gv.size_of(factor, axis) for axis in (2, 3)]
    return tape.op("Reshape", [factor, gv.constant(tape, [-1, *sizes])])


def _gathered_up(experts: _Experts, rows: ir.Value, tape: Tape) -> ir.Value:
    del rows  # every expert of a token reads the same
    x, chosen, gate_up = (experts.operand(place) for place in (0, 1, 3))
    weights = tape.op("Gather", [gate_up, chosen])  # [t, top, 2i, h]
    shape = [-1, experts.top * 2 * experts.width, gv.size_of(gate_up, 2)]
    flat = tape.op("Reshape", [weights, gv.constant(tape, shape)])
    both = tape.op("MatMul", [flat, tape.op("Unsqueeze", [x, gv.constant(tape, [-1])])])
    return tape.op("Reshape", [both, gv.constant(tape, [-1, experts.top, 2 * experts.width])])


def _gathered_down(experts: _Experts, acted: ir.Value, tape: Tape) -> ir.Value:
    weights = tape.op("Gather", [experts.operand(4), experts.operand(1)])  # [t, top, h, i]
    column = tape.op("Unsqueeze", [acted, gv.constant(tape, [-1])])
    total = _sum_of_experts(tape, tape.op("MatMul", [weights, column]))
    return tape.op("Squeeze", [total, gv.constant(tape, [-1])])


def _dense_up(experts: _Experts, rows: ir.Value, tape: Tape) -> ir.Value:
    """All experts of all tokens, and of these the chosen ones."""
    del rows
    x, chosen, gate_up = (experts.operand(place) for place in (0, 1, 3))
    zero = gv.constant(tape, np.array(0, gv.present(x.dtype).numpy()))
    wide, sums = 2 * experts.width, []
    for start, end in pairwise(experts.bounds):
        weights = _between(experts, tape, gate_up, start, end)
        flat = tape.op("Reshape", [weights, gv.constant(tape, [(end - start) * wide, -1])])
        both = tape.op("MatMul", [x, tape.op("Transpose", [flat], {"perm": [1, 0]})])
        apart = tape.op("Reshape", [both, gv.constant(tape, [-1, end - start, wide])])
        place = tape.op("Sub", [chosen, gv.constant(tape, start)])
        inside = tape.op("Max", [place, gv.constant(tape, 0)])
        inside = tape.op("Min", [inside, gv.constant(tape, end - start - 1)])
        index = tape.op("Unsqueeze", [inside, gv.constant(tape, [-1])])
        own = tape.op("GatherND", [apart, index], {"batch_dims": 1})
        is_own = tape.op("Equal", [place, inside])
        is_own = tape.op("Unsqueeze", [is_own, gv.constant(tape, [-1])])
        sums.append(tape.op("Where", [is_own, own, zero]))
    return _sum(tape, sums)


def _dense_down(experts: _Experts, acted: ir.Value, tape: Tape) -> ir.Value:
    """Of each token all experts, of which those that are not chosen get zeros."""
    chosen, down, sums = experts.operand(1), experts.operand(4), []
    rows = tape.op("Unsqueeze", [chosen, gv.constant(tape, [1])])  # [t, 1, top]
    for start, end in pairwise(experts.bounds):
        numbers = gv.constant(tape, np.arange(start, end)[:, None])
        is_own = tape.op("Equal", [rows, numbers])  # [t, count, top]
        given = tape.op("MatMul", [tape.op("CastLike", [is_own, acted]), acted])
        shape = gv.constant(tape, [-1, (end - start) * experts.width])
        weights = _between(experts, tape, down, start, end)
        turned = tape.op("Transpose", [weights], {"perm": [0, 2, 1]})
        flat = tape.op("Reshape", [turned, gv.constant(tape, [(end - start) * experts.width, -1])])
        sums.append(tape.op("MatMul", [tape.op("Reshape", [given, shape]), flat]))
    return _sum(tape, sums)


def _between(experts: _Experts, tape: Tape, weights: ir.Value, start: int, end: int) -> ir.Value:
    if len(experts.bounds) == 2:
        return weights
    return part(tape, weights, start=start, count=end - start)


def _sum(tape: Tape, values: list[ir.Value]) -> ir.Value:
    return functools.reduce(lambda one, other: tape.op("Add", [one, other]), values)
