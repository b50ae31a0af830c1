"""ONNX function bodies of the LoRA operators that take an adapter for each token.

    t = x @ A            [slots, tokens, R], of every adapter
    t = t where the token's slot is the adapter's, else 0
    d = t @ B            t as [tokens, slots * R], B as [slots * R, n]

The tokens of other adapters are replaced and not multiplied by 0: one adapter's t may be infinite
on another's tokens. What they add to the sum is zero and exact. A token's bits do not depend on the
other tokens' adapters, nor on its own one's slot where R is a power of two: blocks of a matrix
product then hold whole adapters. They may depend on the shapes, as those of any matrix product.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.plugins.contract.operators import COLUMNS, DOMAIN, Operator


def slots_function(operator: Operator, opset: int) -> ir.Function:
    """Return the model-local function of an operator with slots, in opset `opset`."""
    inputs = [ir.val(name) for name in operator.input_names]
    x, slot, rank = inputs[:3]
    tape = Tape()
    rows = tape.op("Flatten", [x], {"axis": -1})  # [tokens, k]
    taken = _taken(tape, slot, rank)
    leading = tape.op("Shape", [x], {"end": -1})
    zero = tape.op("CastLike", [constant(tape, np.float32(0)), x])
    outputs = []
    for site in range(operator.sites):
        a, b = (inputs[index] for index in operator.factors(site))
        t = tape.op("Where", [taken, tape.op("MatMul", [rows, a]), zero])
        beside = tape.op("Transpose", [t], {"perm": [1, 0, 2]})  # [tokens, slots, R]
        below = tape.op("Reshape", [b, _joined(tape, [-1], tape.op("Shape", [b], {"start": 2}))])
        product = tape.op("MatMul", [tape.op("Flatten", [beside], {"axis": 1}), below])
        delta = tape.op("Reshape", [product, _joined(tape, leading, [-1])])  # [..., n]
        if operator.has_addend:
            delta = tape.op("Add", [inputs[operator.addend(site)], delta])
        outputs.append(delta)
    imports = {"": opset}
    body = ir.Graph(inputs, outputs, nodes=tape.nodes, opset_imports=imports, name=operator.name)
    columns = ir.Attr(
        COLUMNS, ir.AttributeType.INTS, None
    )  # the body takes ranks as they are padded
    return ir.Function(DOMAIN, operator.name, graph=_named(body), attributes=[columns])


def _taken(tape: Tape, slot: ir.Value, rank: ir.Value) -> ir.Value:
    """Whether a token takes an adapter [slots, tokens, 1]; the same nodes in every function."""
    count = tape.op("Squeeze", [tape.op("Shape", [rank], {"start": 0, "end": 1})])
    numbers = tape.op("Range", [constant(tape, 0), count, constant(tape, 1)])
    of_slots = tape.op("Reshape", [numbers, constant(tape, [-1, 1, 1])])
    wide = tape.op("Cast", [slot], {"to": ir.DataType.INT64})
    of_tokens = tape.op("Reshape", [wide, constant(tape, [-1, 1])])
    return tape.op("Equal", [of_tokens, of_slots])


def _joined(tape: Tape, *sizes: ir.Value | list[int]) -> ir.Value:
    """One shape of several parts."""
    parts = [constant(tape, part) if isinstance(part, list) else part for part in sizes]
    return tape.op("Concat", parts, {"axis": 0})


def constant(tape: Tape, value: object) -> ir.Value:
    """Return a constant of the graph; whole numbers are int64."""
    array = np.asarray(value)
    dtype = np.int64 if array.dtype.kind == "i" else array.dtype
    return tape.op("Constant", [], {"value": ir.tensor(array.astype(dtype))})


def _named(body: ir.Graph) -> ir.Graph:
    for number, node in enumerate(body):
        node.name = node.outputs[0].name = f"{node.op_type}_{number}"
    return body
