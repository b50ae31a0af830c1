"""Products with the weights of chosen experts in loops, for ONNX Runtime.

`looped` is for few rows, block by block. An operator that gathers copies what it gathers: the
weights of a token's experts, all at once, are written to memory and read again, 3 times the time
of a product with weights that lie there. A block of one expert stays in the processor's cache
until it is multiplied: 1.5 times (one core, 4 of 32 experts of 2,048 x 1,024, blocks of 0.5 to
1 MB alike).

`grouped` is for more: expert by expert, the rows that take it are multiplied together. Neither has
a node that reads weights alone: ONNX Runtime would compute that once and keep its result.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv

BLOCK_BYTES = 1 << 20  # of weights that are copied at a time


def looped(tape: Tape, weights: ir.Value, chosen: ir.Value, rows: ir.Value, label: str) -> ir.Value:
    """Return the product of each row with the weights of its expert [t, top, n].

    Args:
        tape: takes the nodes.
        weights: of all experts [E, n, k].
        chosen: the expert of each row [t, top].
        rows: [t, top, k].
        label: begins the names of values in the loop's body.
    """
    n, k = gv.size_of(weights, 1), gv.size_of(weights, 2)
    parts = _parts(n, k * int(gv.present(weights.dtype).itemsize))
    experts = tape.op("Reshape", [chosen, gv.constant(tape, [-1, 1, 1])])
    first = gv.constant(tape, np.arange(0, n, n // parts)[None, :, None])
    zeros = gv.constant(tape, np.zeros((1, parts, 1), np.int64))
    numbers = tape.op("Add", [experts, zeros])  # [t * top, parts, 1]
    firsts = tape.op("Add", [tape.op("Mul", [numbers, zeros]), first])
    starts = tape.op("Concat", [numbers, firsts], {"axis": 2})
    starts = tape.op("Reshape", [starts, gv.constant(tape, [-1, 2])])  # (expert, first row)
    columns = tape.op("Reshape", [rows, gv.constant(tape, [-1, k, 1])])
    count = tape.op("Squeeze", [tape.op("Shape", [starts], {"start": 0, "end": 1})])
    body = _body(weights, starts, columns, n // parts, parts, label)
    always = tape.op("Constant", [], {"value": ir.tensor(np.array(True))})
    blocks = tape.op("Loop", [count, always], {"body": body})
    return tape.op("Reshape", [blocks, gv.constant(tape, [-1, gv.size_of(chosen, 1), n])])


def grouped(
    tape: Tape, weights: ir.Value, chosen: ir.Value, rows: ir.Value, label: str
) -> ir.Value:
    """Do as `looped`, expert by expert."""
    experts, n, k = (gv.size_of(weights, axis) for axis in range(3))
    flat = tape.op("Reshape", [chosen, gv.constant(tape, [-1])])
    own = tape.op("Reshape", [rows, gv.constant(tape, [-1, k])])
    count = tape.op("Shape", [flat])
    zero = gv.constant(tape, np.array(0, gv.present(weights.dtype).numpy()))
    sizes = tape.op("Concat", [count, gv.constant(tape, [n])], {"axis": 0})
    empty = tape.op("Expand", [zero, sizes])
    always = tape.op("Constant", [], {"value": ir.tensor(np.array(True))})
    body = _body_of_expert(weights, flat, own, label)
    found = tape.op("Loop", [gv.constant(tape, experts), always, empty], {"body": body})
    return tape.op("Reshape", [found, gv.constant(tape, [-1, gv.size_of(chosen, 1), n])])


def _body_of_expert(weights: ir.Value, flat: ir.Value, rows: ir.Value, label: str) -> ir.Graph:
    """The rows of one expert, written among all."""
    number, condition = ir.val("", ir.DataType.INT64, []), ir.val("", ir.DataType.BOOL, [])
    before, tape = ir.val("", None, [None, gv.size_of(weights, 1)], type=weights.type), Tape()
    is_own = tape.op("Equal", [flat, number])
    places = tape.op("Transpose", [tape.op("NonZero", [is_own])], {"perm": [1, 0]})  # [m, 1]
    own = tape.op("GatherND", [rows, places])
    product = tape.op("Gemm", [own, tape.op("Gather", [weights, number])], {"transB": 1})
    after = tape.op("ScatterND", [before, places, product])
    after.type, after.shape = before.type, before.shape
    again = tape.op("Identity", [condition])
    again.type, again.shape = condition.type, condition.shape
    _name(label, [number, condition, before], tape)
    inputs = [number, condition, before]
    return ir.Graph(inputs, [again, after], nodes=tape.nodes, name="expert")


def _name(label: str, inputs: list[ir.Value], tape: Tape) -> None:
    made = [output for node in tape.nodes for output in node.outputs]
    for number, value in enumerate((*inputs, *made)):
        value.name = f"{label}.body.{number}"


def _parts(n: int, row_bytes: int) -> int:
    """Into how many blocks of equal rows a matrix is divided."""
    wanted = min(-(-n * row_bytes // BLOCK_BYTES), n)
    return next(parts for parts in range(wanted, n + 1) if n % parts == 0)


def _body(
    weights: ir.Value, starts: ir.Value, columns: ir.Value, height: int, parts: int, label: str
) -> ir.Graph:
    """One block times the column of its row."""
    number = ir.val("", ir.DataType.INT64, [])
    condition = ir.val("", ir.DataType.BOOL, [])
    tape = Tape()
    start = tape.op("Gather", [starts, number])
    end = tape.op("Add", [start, gv.constant(tape, [1, height])])
    block = tape.op("Slice", [weights, start, end, gv.constant(tape, [0, 1])])
    place = tape.op("Div", [number, gv.constant(tape, parts)])
    product = tape.op("MatMul", [block, tape.op("Gather", [columns, place])])
    again = tape.op("Identity", [condition])
    again.type, again.shape = condition.type, condition.shape
    product.type, product.shape = weights.type, ir.Shape([1, height, 1])
    _name(label, [number, condition], tape)
    return ir.Graph([number, condition], [again, product], nodes=tape.nodes, name="block")
