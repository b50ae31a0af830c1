"""Pass that flattens [batch, sequence, n] to [tokens, n] where each token is computed by itself.

1. Nodes that compute by token form a region: elementwise ones, norms over the last axis, products
   with a matrix, and LoRA nodes of one adapter.
2. Values that enter it are reshaped to [tokens, n], a view of a view as one view; those that other
   nodes read are reshaped back to [batch, sequence, n].
3. The graph is left alone where more views would come than additions go, and where every token has
   an adapter of its own. Outputs of the graph keep their shape.

ONNX Runtime adds inside a matrix product of two dimensions (`Gemm`), and of no more: a LoRA site
then costs two nodes instead of three.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.plugins.contract.operators import DOMAIN, operator_named
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS

# Before the width; ONNX Runtime adds inside a product where it knows the sizes to be equal.
FLAT = (ir.SymbolicDim("tokens"),)
_NORMS = ("LayerNormalization", "RMSNormalization")
_ELEMENTWISE = (
    *("Abs", "Cast", "Erf", "Exp", "Gelu", "Identity", "Neg", "Relu", "Sigmoid", "Softplus"),
    *("Sqrt", "Tanh", "Add", "Div", "Max", "Min", "Mul", "Pow", "Sub"),
    *("QuantizeLinear", "DequantizeLinear"),  # with one scale
)

Sizes = tuple[int | ir.SymbolicDim, ...]


@dataclass(frozen=True)
class _Region:
    """Nodes that compute token by token, and the values that come in and go out."""

    nodes: Collection[ir.Node]
    entries: Sequence[ir.Value]
    exits: Sequence[ir.Value]

    @property
    def sites(self) -> int:
        """LoRA sites whose addition becomes part of a product."""
        return sum(len(node.outputs) for node in self.nodes if node.domain == DOMAIN)


class FlattenBatch(ir.passes.InPlacePass):
    """The pass, for a graph with `input_ids` [batch, sequence]."""

    def requires(self, model: ir.Model) -> None:
        """The token ids have two dimensions, whose names tell what is [batch, sequence, n]."""
        gv.require_inputs(model, INPUT_IDS)
        shape = gv.graph_input(model, INPUT_IDS).shape
        gv.require(shape is not None and len(shape) == 2, f"{INPUT_IDS} is not [batch, sequence]")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        ids = gv.graph_input(model, INPUT_IDS)
        region = _region(model.graph, tuple(ids.shape or ()))
        is_shorter = region.sites > len(region.entries) + len(region.exits)
        if is_shorter:
            _leave(region, model.graph, _sizes(model.graph, ids))
            _enter(region, model.graph)
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=is_shorter)

    def ensures(self, model: ir.Model) -> None:
        """A LoRA node's results are flat where what it reads is, and nowhere else."""
        for node in model.graph:
            if node.domain == DOMAIN:
                flat = {has_tokens(gv.present(v), FLAT) for v in (node.inputs[0], *node.outputs)}
                gv.ensure(len(flat) == 1, f"{node.name} is flat on one side alone")


def _region(graph: ir.Graph, leading: Sizes) -> _Region:
    nodes = {node: None for node in graph if is_by_token(node, leading)}
    read = dict.fromkeys(value for node in nodes for value in node.inputs)
    computed = [output for node in nodes for output in node.outputs]
    return _Region(
        nodes,
        [v for v in read if v and has_tokens(v, leading) and v.producer() not in nodes],
        [v for v in computed if any(node not in nodes for node in v.consumers())],
    )


def is_by_token(node: ir.Node, leading: Sizes) -> bool:
    """Whether a node computes each token from its own values and from what all share.

    Args:
        node: one that makes an output of the graph does not count.
        leading: the sizes of tokens before their width.
    """
    operands = [value for value in node.inputs if value is not None]
    if not _shares_the_rest(node, operands, leading):
        return False
    return all(has_tokens(v, leading) and not v.is_graph_output() for v in node.outputs)


def _shares_the_rest(node: ir.Node, operands: Sequence[ir.Value], leading: Sizes) -> bool:
    if node.domain == DOMAIN:
        operator = operator_named(node.op_type)
        return operator is not None and not operator.has_slots
    if node.domain:
        return False
    if node.op_type == "MatMul":
        return has_tokens(operands[0], leading) and _rank(operands[1]) == 2
    if node.op_type in _NORMS:
        return node.attributes.get_int("axis", -1) == -1
    return node.op_type in _ELEMENTWISE and all(
        has_tokens(value, leading) or _rank(value) in (0, 1) for value in operands
    )


def has_tokens(value: ir.Value, leading: Sizes) -> bool:
    """Whether a value is [leading, n], its width n known."""
    shape = value.shape
    if shape is None or len(shape) != len(leading) + 1:
        return False
    return tuple(shape)[:-1] == leading and isinstance(shape[-1], int)


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _sizes(graph: ir.Graph, ids: ir.Value) -> ir.Value:
    """[batch, sequence, -1], at the beginning of the graph."""
    tape = Tape()
    sizes = tape.op("Concat", [tape.op("Shape", [ids]), gv.constant(tape, [-1])], {"axis": 0})
    graph.insert_before(graph[0], gv.unnamed(tape))
    return sizes


def _leave(region: _Region, graph: ir.Graph, sizes: ir.Value) -> None:
    """Give other nodes the values as they were."""
    for value in region.exits:
        tape, uses = Tape(), tuple(value.uses())
        deep = tape.op("Reshape", [value, sizes])
        deep.type, deep.shape = value.type, value.shape
        for node, index in uses:
            if node not in region.nodes:
                node.replace_input_with(index, deep)
        gv.insert_behind(graph, value, gv.unnamed(tape))
    for node in region.nodes:
        for value in node.outputs:
            value.shape = ir.Shape([*FLAT, gv.present(value.shape)[2]])


def _enter(region: _Region, graph: ir.Graph) -> None:
    """Flatten what the region reads of others; a view of a view is one view."""
    for value in region.entries:
        source, tape, width = value, Tape(), gv.present(value.shape)[2]
        while (view := source.producer()) and view.op_type == "Reshape" and view.inputs[0]:
            source = view.inputs[0]
        flat = tape.op("Reshape", [source, gv.constant(tape, [-1, width])])
        flat.type, flat.shape = value.type, ir.Shape([*FLAT, width])
        for node, index in tuple(value.uses()):
            if node in region.nodes:
                node.replace_input_with(index, flat)
        gv.insert_behind(graph, source, gv.unnamed(tape))
