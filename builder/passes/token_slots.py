"""The slot of every token of a linear's input, from the slot of every row of the batch.

What a token's row is, the sizes of the input say, by name; a graph by another exporter may have
another name than `batch`:

1. [batch, ..., k]: the row is the first index. So it is of patches of a convolution's input.
2. [1, kept, k] of a static cache: that of the token kept, counted over `input_ids`.
3. A view of one of these, whose last sizes make up k: its tokens, in their order.
4. [tokens, k] that is computed from one of these, each token by itself.

Any other input is refused by name: a wrong row would be another adapter.
"""

import math
from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import Linear, source_of
from trt_lora.plugins.contract.operators import DOMAIN
from trt_lora.plugins.contract.slots import LORA_RANK, LORA_SLOT, SLOT_ROWS, SLOTS
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.generation.decoding.step_inputs import (
    BATCH,
    INPUT_IDS,
    KEPT,
    KEPT_PLACES,
    SEQUENCE,
)

Sizes = tuple[int | str | None, ...]

_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_PRODUCTS = ("MatMul", "Gemm")
_TOKENWISE = ("Add", "Mul", "Sigmoid", "Swish", "Tanh", "Gelu", "Relu")


class TokenSlots:
    """The inputs `lora_slot` and `lora_rank` of a graph, and what nodes need of them."""

    def __init__(self, graph: ir.Graph, sites: int, batch: str = BATCH) -> None:
        """Add the inputs.

        Args:
            graph: in which the nodes will be.
            sites: the number of sites of the engine.
            batch: the name of the dimension that counts rows.
        """
        self._graph, self._batch = graph, batch
        self._made: dict[tuple[Sizes, ir.Value | None], ir.Value] = {}
        self._rows: dict[tuple[Sizes, ir.Value], ir.Value] = {}  # of stacks of vectors
        self._slot = ir.val(LORA_SLOT, ir.DataType.INT32, [SLOT_ROWS])
        self.rank = ir.val(LORA_RANK, ir.DataType.INT32, [SLOTS, sites])
        graph.inputs.extend([self._slot, self.rank])

    def operands(
        self, linear: Linear, patches: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value]:
        """Return `slot` [tokens of x] and `rank` of the node of a linear.

        Args:
            linear: that the node adds to.
            patches: [rows, *sizes, k] of x, of a convolution.

        Raises:
            ModelError: it cannot be told which row a token of x belongs to.
        """
        if patches is None:
            slot = self._of(linear.x, linear.k)
        else:
            slot = self._of_patches(linear, patches)
        if slot is None:
            raise _untold(linear.x, linear.path)
        return slot, self.rank

    def of_ids(self, ids: ir.Value, path: str) -> ir.Value:
        """Return the slot of each of the token ids [batch, ...] that the module at `path` reads.

        Raises:
            ModelError: as `operands`.
        """
        sizes = _sizes(ids)
        if sizes[:1] != (self._batch,):
            raise _untold(ids, path)
        return self._of_rows(sizes, ids, {})

    def gather(self, stack: ir.Value, linear: Linear) -> ir.Value:
        """Return the row of a stack [slots + 1, n] for each token of a linear's output [..., n].

        Raises:
            ModelError: as `operands`.
        """
        gather = ir.node("Gather", [stack, self._places(stack, linear)], {"axis": 0})
        gather.outputs[0].type = stack.type
        self._graph.insert_before(self._graph[0], gather)  # which is sorted later
        return gather.outputs[0]

    def _places(self, stack: ir.Value, linear: Linear) -> ir.Value:
        """The row of a stack for each token [...], without a sign: TensorRT counts from 0 alone.

        The sizes are those of x, so that TensorRT knows the sum with the rows to have no others.
        """
        sizes, (slot, _) = _sizes(linear.x)[:-1], self.operands(linear)
        key = sizes, linear.x if None in sizes else slot
        if key not in self._rows:
            tape = Tape()
            count = tape.op("Shape", [stack], {"start": 0, "end": 1})
            last = tape.op("Sub", [count, gv.constant(tape, [1])])
            wide = tape.op("Cast", [slot], {"to": ir.DataType.INT64})
            is_base = tape.op("Less", [wide, gv.constant(tape, [0])])
            places = tape.op("Where", [is_base, last, wide])
            leading = tape.op("Shape", [linear.x], {"end": -1})
            self._rows[key] = self._inserted(tape, tape.op("Reshape", [places, leading]))
        return self._rows[key]

    def _of(self, x: ir.Value, width: int) -> ir.Value | None:
        """The slots of x read as [tokens, width]."""
        x = source_of(x)
        leading = _leading(_sizes(x), width)
        if leading[:1] == (self._batch,):
            return self._of_rows(leading, x, {"end": len(leading)})
        if leading == (1, KEPT):
            return self._of_kept(leading)
        node = x.producer()
        if node is None or node.inputs[0] is None:
            return None
        if node.op_type in _VIEWS:
            return self._of(node.inputs[0], width)
        return self._of_same(node, leading) if len(leading) == 1 else None

    def _of_patches(self, linear: Linear, patches: ir.Value) -> ir.Value | None:
        """The slots of [rows, *sizes], of which an output [rows, n, *sizes] has the sizes."""
        sizes = (*_sizes(linear.x)[:1], *_sizes(linear.y)[2:])
        if sizes[:1] != (self._batch,):
            return None
        return self._of_rows(sizes, patches, {"end": len(sizes)})

    def _of_same(self, node: ir.Node, leading: Sizes) -> ir.Value | None:
        """The slots of what a node reads, if it computes each token of that by itself."""
        if node.op_type not in (*_PRODUCTS, *_TOKENWISE) and node.domain != DOMAIN:
            return None
        # The rows of a product are those of its left operand.
        for operand in node.inputs[:1] if node.op_type in _PRODUCTS else node.inputs:
            if operand is not None and _sizes(operand)[:-1] == leading:
                width = _sizes(operand)[-1]
                return self._of(operand, width) if isinstance(width, int) else None
        return None

    def _of_rows(self, sizes: Sizes, like: ir.Value, axes: Mapping[str, int]) -> ir.Value:
        """The slot of every row, once for each place of `sizes`.

        It is made once for all values of these sizes, or, where one has no name, for this one.

        Args:
            sizes: how many tokens there are.
            like: a value that begins with these sizes.
            axes: which axes of it they are, as attributes of Shape.
        """
        key = sizes, like if None in sizes else None
        if key not in self._made:
            tape = Tape()
            column = gv.constant(tape, [-1] + [1] * (len(sizes) - 1))
            rows = tape.op("Reshape", [self._slot, column])
            spread = tape.op("Expand", [rows, tape.op("Shape", [like], axes)])
            flat = tape.op("Reshape", [spread, gv.constant(tape, [-1])])
            self._made[key] = self._inserted(tape, flat)
        return self._made[key]

    def _of_kept(self, sizes: Sizes) -> ir.Value | None:
        inputs = {value.name: value for value in self._graph.inputs}
        if INPUT_IDS not in inputs or KEPT_PLACES not in inputs:
            return None
        key = sizes, None
        if key not in self._made:
            every, tape = self._of_rows((BATCH, SEQUENCE), inputs[INPUT_IDS], {}), Tape()
            kept = tape.op("Gather", [every, inputs[KEPT_PLACES]])
            self._made[key] = self._inserted(tape, kept)
        return self._made[key]

    def _inserted(self, tape: Tape, value: ir.Value) -> ir.Value:
        """Put nodes into the graph, which is sorted later, and name the value they end in."""
        nodes = gv.unnamed(tape)
        value.name = f"{LORA_SLOT}_of_tokens_{len(self._made)}"
        self._graph.insert_before(self._graph[0], nodes)
        return value


def _untold(x: ir.Value, path: str) -> ModelError:
    return ModelError(
        f"the input of {path} has shape {x.shape}: which row of the batch a token is in cannot be "
        "told, and so not which adapter it takes; leave its kind out of --lora-target-modules, or "
        "leave out --max-loras"
    )


def _sizes(value: ir.Value) -> Sizes:
    """Every size of a value: its number, its name, or None."""
    return tuple(s if isinstance(s, int) else s.value for s in value.shape or ())


def _leading(sizes: Sizes, width: int) -> Sizes:
    """The sizes before the last ones that make up `width`; none where none do."""
    for count in range(1, len(sizes) + 1):
        last = [size for size in sizes[-count:] if isinstance(size, int)]
        if len(last) == count and math.prod(last) == width:
            return sizes[:-count]
    return ()
