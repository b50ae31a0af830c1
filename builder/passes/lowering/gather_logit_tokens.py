"""Pass that gathers the tokens that get logits behind the last attention, not before the head.

1. The exporter's choice before the output head, `hidden.reshape(1, -1, n)[:, kept]`, is matched
   from the input `kept` on, over views and axes of one that are moved.
2. Nodes that the choice alone needs, and that compute by token, read `Gather(value, kept)` of what
   flat tokens [tokens, n] come in; the choice itself goes.
3. Left alone is a choice among tokens that are not flat, and what other tokens need.

Of a prompt that is one token of hundreds, or none: its last layer's products cost nothing then.
"""

from collections.abc import Collection
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.lowering.flatten_batch import FLAT, has_tokens, is_by_token
from trt_lora.runtime.generation.decoding.step_inputs import KEPT_PLACES

_SWAP = [1, 0, 2]  # [1, tokens, n] and [tokens, 1, n]


class _Choice(NamedTuple):
    """Where the exporter lets the output head see the tokens kept alone."""

    view: ir.Node  # reads all tokens [tokens, n]
    last: ir.Node  # gives those kept [1, kept, n]


class GatherLogitTokens(ir.passes.InPlacePass):
    """The pass, for a graph of flat tokens [tokens, n]."""

    def requires(self, model: ir.Model) -> None:
        """The graph takes the places of the tokens kept, of a known shape, and reads them."""
        gv.require_inputs(model, KEPT_PLACES)
        places = gv.graph_input(model, KEPT_PLACES)
        gv.require(places.shape is not None and len(places.shape) == 1, "kept is not [kept]")
        gv.require(bool(places.uses()), "nothing reads kept")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; unmodified where the tokens that are chosen from are not flat."""
        places = gv.graph_input(model, KEPT_PLACES)
        choice = _choice(places)
        if choice is not None:
            _choose_first(model.graph, choice.view, places)
            _replace(choice.last, choice.view.inputs[0])
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=choice is not None)

    def ensures(self, model: ir.Model) -> None:
        """The places are still read: no token is chosen in another way."""
        gv.ensure(bool(gv.graph_input(model, KEPT_PLACES).uses()), "nothing reads kept any more")


def _choice(places: ir.Value) -> _Choice | None:
    """Find `hidden.reshape(1, -1, n)[:, kept]`, as the exporter writes it."""
    node = found = _reader(_reader(places, "Unsqueeze"), "GatherND")
    last = _reader(found, "Transpose")
    while node is not None and last is not None and _moves_nothing(node):
        value = gv.present(node.inputs[0])
        if has_tokens(value, FLAT):
            return _Choice(node, last)
        node = value.producer()
    return None


def _reader(read: ir.Value | ir.Node | None, kind: str) -> ir.Node | None:
    """The only node that reads a value, or a node's first output, if it is of this kind."""
    value = read.outputs[0] if isinstance(read, ir.Node) else read
    readers = () if value is None else value.consumers()
    return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None


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
    gv.insert_behind(graph, value, gather)


def _kept_shape(value: ir.Value, places: ir.Value) -> ir.Shape:
    return ir.Shape([gv.present(places.shape)[0], gv.present(value.shape)[-1]])


def _replace(last: ir.Node, chosen: ir.Value | None) -> None:
    """Put what was chosen before [kept, n] in the place of the choice, as [1, kept, n]."""
    tape = Tape()
    batch = tape.op("Unsqueeze", [chosen, gv.constant(tape, [0])])
    gv.replace_node(last, gv.unnamed(tape), batch)
