"""Pass that makes attention over a cache in place ONNX Runtime's own operator.

1. `TensorScatter` (keys and values), `Slice` to `bound`, `Attention` become one
   `com.microsoft.GroupQueryAttention`, which reads only what each row holds. Rows of different
   lengths then cost what they are long; with a mask every row costs as much as the longest.
2. A causal mask, with a sliding window or without, becomes the operator's own.
3. `RotaryEmbedding` by the same tables of queries and keys becomes part of it.
4. Left alone is what the operator cannot express: another mask, keys and values of different
   widths, heads whose width is no multiple of 8, keys shared between layers.
"""

from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.lowering.attention_masks import FULL, attention_window, boolean_mask
from trt_lora.builder.passes.lowering.rotary_embeddings import ROTARY_EMBEDDING
from trt_lora.builder.passes.lowering.standard_attention import ATTENTION, SOFTCAP, require_masks
from trt_lora.runtime.generation.decoding.step_inputs import BOUND, INPUT_IDS

DOMAIN = "com.microsoft"
OPERATOR = "GroupQueryAttention"

_WIDTH_MULTIPLE = 8  # the operator takes heads of such widths alone, and says so when it runs
_ROTARY_MULTIPLE = 16  # and turns those of such widths

_SWAP_HEADS = [0, 2, 1, 3]  # [batch, heads, s, dim] and [batch, s, heads, dim]


@dataclass(frozen=True)
class _Row:
    """Where one of keys and values goes: its cache, what is new, and the cache as written."""

    cache: ir.Value
    new: ir.Value
    scatter: ir.Node
    view: ir.Node

    @property
    def lengths(self) -> ir.Value:
        return gv.present(self.scatter.inputs[2])


@dataclass
class GroupQueryAttention(ir.passes.InPlacePass):
    """The pass, for a graph as the exporter leaves it."""

    _windows: dict[ir.Value, int | None] = field(default_factory=dict, init=False)
    _counts: tuple[ir.Value, ir.Value] | None = field(default=None, init=False)

    def requires(self, model: ir.Model) -> None:
        """A graph with attention takes token ids and bound; attention reads a mask."""
        if require_masks(model):
            gv.require_inputs(model, INPUT_IDS, BOUND)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; unmodified where no attention can be expressed."""
        self._windows, self._counts = {}, None
        nodes = [node for node in model.graph if node.op_type == ATTENTION]
        done = [self._rewrite(model, node) for node in nodes]
        if any(done):
            model.graph.opset_imports[DOMAIN] = 1
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=any(done))

    def ensures(self, model: ir.Model) -> None:
        """The graph returns the caches that the operator has written."""
        for node in model.graph:
            if node.domain == DOMAIN and node.op_type == OPERATOR:
                written = [output.is_graph_output() for output in node.outputs[1:]]
                gv.ensure(all(written), f"a cache of {node.name} is not returned")

    def _rewrite(self, model: ir.Model, node: ir.Node) -> bool:
        rows = _row(node, 1), _row(node, 2)
        window = self._window(model, node, rows[0])
        if rows[0] is None or rows[1] is None or window is None:
            return False
        width = gv.size_of(rows[0].cache, 3)
        if width != gv.size_of(rows[1].cache, 3) or width % _WIDTH_MULTIPLE:
            return False
        _replace(node, rows[0], rows[1], window, self._token_counts(model, node, rows[0]))
        return True

    def _window(self, model: ir.Model, node: ir.Node, keys: _Row | None) -> int | None:
        seen = boolean_mask(gv.present(node.inputs[3]))
        if seen is None or keys is None:
            return None
        if seen not in self._windows:
            self._windows[seen] = attention_window(model, seen, gv.size_of(keys.cache, 2))
        return self._windows[seen]

    def _token_counts(
        self, model: ir.Model, node: ir.Node, keys: _Row
    ) -> tuple[ir.Value, ir.Value]:
        """Tokens of each row less one [batch], and of the longest [], int32; for all layers."""
        if self._counts is None:
            tape = Tape()
            ids, bound = (gv.graph_input(model, name) for name in (INPUT_IDS, BOUND))
            new = tape.op("Shape", [ids], {"start": 1, "end": 2})
            last = tape.op("Sub", [tape.op("Add", [keys.lengths, new]), gv.constant(tape, [1])])
            longest = tape.op("Squeeze", [tape.op("Shape", [bound])])
            to = {"to": ir.DataType.INT32}
            self._counts = tape.op("Cast", [last], to), tape.op("Cast", [longest], to)
            model.graph.insert_before(node, gv.unnamed(tape))
        return self._counts


def _replace(
    node: ir.Node, keys: _Row, values: _Row, window: int, counts: tuple[ir.Value, ir.Value]
) -> None:
    query = gv.present(node.inputs[0])
    operands, tables = _behind_rotary_embedding([query, keys.new])
    tape = Tape()
    attributes: dict[str, int | float] = {
        "num_heads": gv.size_of(query, 1),
        "kv_num_heads": gv.size_of(keys.cache, 1),
        "scale": node.attributes["scale"].as_float(),
        "do_rotary": int(bool(tables)),
    }
    if cap := node.attributes.get_float(SOFTCAP, 0.0):
        attributes[SOFTCAP] = cap
    if window != FULL:
        attributes["local_window_size"] = window
    rows = [_flat(tape, value) for value in (*operands, values.new)]
    attended, *written = tape.op_multi_out(
        OPERATOR, [*rows, keys.cache, values.cache, *counts, *tables], attributes, num_outputs=3,
        domain=DOMAIN,
    )  # fmt: skip
    heads = tape.op("Reshape", [attended, gv.constant(tape, [0, 0, gv.size_of(query, 1), -1])])
    result = tape.op("Transpose", [heads], {"perm": _SWAP_HEADS})
    gv.replace_node(node, gv.unnamed(tape), result)
    for row, output in zip((keys, values), written, strict=True):
        _take_over(row, output)
    _join_views(result)


def _behind_rotary_embedding(values: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
    """What is turned, and the tables that turn it; no tables where values are not turned alike."""
    nodes = [node for value in values if (node := value.producer()) is not None]
    if any(node.op_type != ROTARY_EMBEDDING for node in nodes) or len(nodes) != len(values):
        return values, []
    read = [[gv.present(operand) for operand in node.inputs[:3]] for node in nodes]
    if (
        any(tables != read[0][1:] for _, *tables in read)
        or gv.size_of(values[0], 3) % _ROTARY_MULTIPLE
    ):
        return values, []
    return [x for x, *_ in read], read[0][1:]


def _take_over(row: _Row, output: ir.Value) -> None:
    """Make the operator's output the graph's, in the place of the scatter's."""
    old = row.scatter.outputs[0]
    output.type, output.shape = old.type, old.shape
    gv.replace_value(old, output)


def _flat(tape: Tape, value: ir.Value) -> ir.Value:
    """[batch, heads, s, dim] as [batch, s, heads * dim]: a linear's own output where it is one."""
    transpose = value.producer()
    if transpose is not None and _swaps_heads(transpose):
        split = gv.present(transpose.inputs[0])
        reshape = split.producer()
        if reshape is not None and reshape.op_type == "Reshape":
            flat = gv.present(reshape.inputs[0])
            if flat.shape is not None and len(flat.shape) == 3:
                return flat
    else:
        split = tape.op("Transpose", [value], {"perm": _SWAP_HEADS})
    return tape.op(
        "Reshape", [split, gv.constant(tape, [0, 0, gv.size_of(value, 1) * gv.size_of(value, 3)])]
    )


def _join_views(result: ir.Value) -> None:
    """Let what turns the result back read the operator's own output."""
    for use in tuple(result.uses()):
        if not _swaps_heads(use.node):
            continue
        heads = gv.present(gv.present(result.producer()).inputs[0])
        ir.convenience.replace_all_uses_with(use.node.outputs[0], heads)


def _row(node: ir.Node, position: int) -> _Row | None:
    """Follow keys (1) or values (2) of attention to their cache; None where others read it too."""
    view = gv.present(node.inputs[position]).producer()
    if view is None or view.op_type != "Slice" or len(tuple(view.outputs[0].uses())) != 1:
        return None
    scatter = gv.present(view.inputs[0]).producer()
    if scatter is None or scatter.op_type != "TensorScatter":
        return None
    written = scatter.outputs[0]
    cache, new = (gv.present(operand) for operand in scatter.inputs[:2])
    if not cache.is_graph_input() or len(tuple(written.uses())) != 1:
        return None
    return _Row(cache, new, scatter, view)


def _swaps_heads(node: ir.Node) -> bool:
    permutation = node.attributes.get("perm")
    return (
        node.op_type == "Transpose"
        and permutation is not None
        and list(permutation.as_ints()) == _SWAP_HEADS
    )
