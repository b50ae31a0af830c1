"""LoRA inputs of nodes of experts, which are lowered together with them (`adapted.py`).

The node `Experts(x, chosen, shares, gate_up, down)` then reads A and B of gate_up, A and B of
down, and in an engine for many adapters the slot of each token and the rank of every expert's
adapter, one row for each expert of each slot; it has no operand for what takes no LoRA.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import Linear
from trt_lora.builder.passes.token_slots import TokenSlots
from trt_lora.plugins.contract.operators import COLUMNS

OPERANDS = 5  # of a node without LoRA
_FACTORS = 4


class ExpertInputs:
    """Gives nodes of experts their LoRA inputs."""

    def __init__(self, graph: ir.Graph, columns: Mapping[str, int], slots: TokenSlots | None):
        """Take what is of all nodes.

        Args:
            graph: of the nodes.
            columns: of the engine's ranks, by path of the site.
            slots: of tokens; None: one adapter at a time.
        """
        self._graph, self._columns, self._slots = graph, columns, slots
        self._ranks: dict[int, ir.Value] = {}

    def add(self, linear: Linear, factors: Sequence[ir.Value]) -> None:
        """Let the node of a matrix of experts read A and B.

        Raises:
            ModelError: with slots, it cannot be told which row a token belongs to.
        """
        node, place = linear.node, _place(linear)
        if len(node.inputs) == OPERANDS:
            node.resize_inputs(OPERANDS + _FACTORS + 2 * (self._slots is not None))
        for number, factor in enumerate(factors):
            node.replace_input_with(OPERANDS + 2 * place + number, factor)
        if self._slots is None:
            return
        slot, rank = self._slots.operands(replace(linear, k=gv.size_of(linear.x, 1)))
        node.replace_input_with(OPERANDS + _FACTORS, slot)
        node.replace_input_with(OPERANDS + _FACTORS + 1, self._of_experts(rank, linear.experts))
        columns = list(node.attributes.get_ints(COLUMNS, (0, 0)))
        columns[place] = self._columns[linear.path]
        node.attributes[COLUMNS] = ir.AttrInt64s(COLUMNS, columns)

    def _of_experts(self, rank: ir.Value, experts: int) -> ir.Value:
        """Ranks [slots, sites] as [slots * E, sites]."""
        if experts not in self._ranks:
            tape, sites = Tape(), gv.size_of(rank, 1)
            apart = tape.op("Unsqueeze", [rank, gv.constant(tape, [1])])
            spread = tape.op("Expand", [apart, gv.constant(tape, [1, experts, 1])])
            ranks = tape.op("Reshape", [spread, gv.constant(tape, [-1, sites])])
            self._graph.insert_before(self._graph[0], gv.unnamed(tape))
            self._ranks[experts] = ranks
        return self._ranks[experts]


def _place(linear: Linear) -> int:
    return int(linear.path.endswith("down_proj"))
