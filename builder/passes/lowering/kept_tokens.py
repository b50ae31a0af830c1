"""Pass that computes, behind the last attention, only the tokens that get logits.

Of a prompt that is one token of hundreds, or none: its last layer's products cost nothing then.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.passes.lowering.flat_tokens import FLAT, has_tokens, is_by_token
from trt_lora.runtime.generation.decoding.static_inputs import KEPT_PLACES

_SWAP = [1, 0, 2]  # [1, tokens, n] and [tokens, 1, n]


class _Choice(NamedTuple):
    """Where the exporter lets the output head see the tokens kept alone."""

    view: ir.Node  # reads all tokens [tokens, n]
    kept: ir.Value  # [1, kept, n]


class KeptTokens(ir.passes.InPlacePass):
    """The pass, for a graph of flat tokens [tokens, n]."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; unmodified where the tokens that are chosen from are not flat."""
        places = next(value for value in model.graph.inputs if value.name == KEPT_PLACES)
        choice = _choice(places)
        if choice is not None:
            _choose_first(model.graph, choice.view, places)
            _replace(choice)
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=choice is not None)


def _choice(places: ir.Value) -> _Choice | None:
    """Find `hidden.reshape(1, -1, n)[:, kept]`, as the exporter writes it."""
    value = found = _made(_made(places, "Unsqueeze"), "GatherND")
    kept = _made(found, "Transpose")
    while value is not None and kept is not None:
        node = value.producer()
        if node is None or not _moves_nothing(node):
            return None
        value = node.inputs[0]
        if value is not None and has_tokens(value, FLAT):
            return _Choice(node, kept)
    return None


def _made(value: ir.Value | None, kind: str) -> ir.Value | None:
    """What the only node that reads a value makes of it, if that is of this kind."""
    readers = () if value is None else value.consumers()
    if len(readers) != 1 or readers[0].op_type != kind:
        return None
    return readers[0].outputs[0]


def _moves_nothing(node: ir.Node) -> bool:
    """Whether a node leaves tokens in their order: a view, the choice, or an axis of one moved."""
    if node.op_type == "Transpose":
        return list(node.attributes["perm"].as_ints()) == _SWAP
    return node.op_type in ("Reshape", "GatherND")


def _choose_first(graph: ir.Graph, view: ir.Node, places: ir.Value) -> None:
    """Choose before the nodes that the view alone needs, and that compute by token."""
    behind = {view: None}
    for node in reversed(graph):
        readers = {reader for output in node.outputs for reader in output.consumers()}
        if readers <= behind.keys() and is_by_token(node, FLAT):
            behind[node] = None
    for value in dict.fromkeys(value for node in behind for value in node.inputs if value):
        if has_tokens(value, FLAT) and value.producer() not in behind:
            _choose(graph, value, places, behind)
    for value in (output for node in behind for output in node.outputs):
        if has_tokens(value, FLAT):
            value.shape = _kept_shape(value, places)


def _choose(
    graph: ir.Graph, value: ir.Value, places: ir.Value, readers: Collection[ir.Node]
) -> None:
    """Give some readers of a value the tokens kept alone."""
    gather = ir.node("Gather", [value, places], {"axis": 0})
    kept = gather.outputs[0]
    kept.type, kept.shape = value.type, _kept_shape(value, places)
    for node, index in tuple(value.uses()):
        if node in readers:
            node.replace_input_with(index, kept)
    producer = value.producer()
    assert producer is not None  # no input of the graph is flat
    graph.insert_after(producer, gather)


def _kept_shape(value: ir.Value, places: ir.Value) -> ir.Shape:
    assert value.shape is not None  # it has tokens
    assert places.shape is not None  # an input's
    return ir.Shape([places.shape[0], value.shape[-1]])


def _replace(choice: _Choice) -> None:
    """Let those who read the choice read [1, kept, n] of what was chosen before."""
    axis = ir.node("Constant", [], {"value": ir.tensor(np.array([0], np.int64))})
    batch = ir.node("Unsqueeze", [choice.view.inputs[0], axis.outputs[0]])
    batch.outputs[0].type, batch.outputs[0].shape = choice.kept.type, choice.kept.shape
    old = choice.kept.producer()
    assert old is not None
    assert isinstance(old.graph, ir.Graph)
    old.graph.insert_before(old, [axis, batch])
    ir.convenience.replace_all_uses_with(choice.kept, batch.outputs[0])
