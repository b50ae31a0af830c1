"""LoRA of the input embedding: E[ids] + A[ids] @ B, with A [V, rank] and B [rank, n].

1. A is read as the embedding itself is, by a Gather; a product and a sum follow.
2. An output head that an adapter may have saved whole gets two products and a sum as well, and no
   node: no kernel takes a rank as large as its width.
3. With slots, ids count over the A of all slots, and each token's row stands in the columns of its
   own slot, with zeros in those of others: one product then has the B of all.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import Linear
from trt_lora.builder.passes.lora_function import taken_slots
from trt_lora.builder.passes.token_slots import TokenSlots


def adapt_table(
    table: Linear, factors: Sequence[ir.Value], slots: TokenSlots | None = None
) -> None:
    """Let all that reads what an embedding or head makes read the sum with its delta.

    Args:
        table: the Gather of the embedding, or the product of the head.
        factors: A [k, rank] and B [rank, n]; with slots, stacks of them.
        slots: of tokens; None: one adapter at a time, always so of a head.

    Raises:
        ModelError: with slots, it cannot be told which row a token belongs to.
    """
    (a, b), tape, y = factors, Tape(), table.y
    if not table.is_embedding:
        rows = tape.op("MatMul", [table.x, a])
    elif slots is None:
        rows = tape.op("Gather", [a, table.node.inputs[1]])
    else:
        rows, b = _of_slots(tape, table, a, b, slots)
    total = tape.op("Add", [None, tape.op("MatMul", [rows, b])])
    total.type, total.shape = y.type, y.shape
    gv.replace_value(y, total)
    tape.nodes[-1].replace_input_with(0, y)
    gv.insert_behind(gv.graph_of(table.node), y, gv.unnamed(tape))


def _of_slots(
    tape: Tape, table: Linear, a: ir.Value, b: ir.Value, slots: TokenSlots
) -> tuple[ir.Value, ir.Value]:
    """Rows [..., slots * R] of every token, and B [slots * R, n]."""
    rank, n, ids = gv.size_of(a, 2), gv.size_of(b, 2), gv.present(table.node.inputs[1])
    slot = slots.of_ids(ids, table.path)
    wide = tape.op("Cast", [slot], {"to": ir.DataType.INT64})
    first = tape.op("Max", [wide, gv.constant(tape, 0)])
    flat = tape.op("Reshape", [ids, gv.constant(tape, [-1])])
    place = tape.op("Add", [tape.op("Mul", [first, gv.constant(tape, table.k)]), flat])
    every = tape.op("Reshape", [a, gv.constant(tape, [-1, rank])])
    own = taken_slots(tape, slot, slots.rank)
    zero = gv.constant(tape, np.zeros((), gv.present(a.dtype).numpy()))
    apart = tape.op("Where", [own, tape.op("Gather", [every, place]), zero])  # [slots, tokens, R]
    beside = tape.op("Flatten", [tape.op("Transpose", [apart], {"perm": [1, 0, 2]})], {"axis": 1})
    leading = tape.op("Concat", [tape.op("Shape", [ids]), gv.constant(tape, [-1])], {"axis": 0})
    rows = tape.op("Reshape", [beside, leading])
    return rows, tape.op("Reshape", [b, gv.constant(tape, [-1, n])])
