"""Pass that makes the rotary embeddings of a trace, six nodes each, one `RotaryEmbedding`.

1. `x cos + (-x2, x1) sin`, which turns the halves of a head or of a part of it, becomes the
   operator.
2. Cosines and sines become tables of all places in the cache: with tables TensorRT turns queries
   and keys in the kernel that writes the cache, and without them in one more.
3. Left alone are interleaved ones, and those whose cosines depend on more than the place.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape
from onnxscript.rewriter import pattern
from onnxscript.rewriter import rewrite as apply_rules

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.lowering.evaluated import evaluated
from trt_lora.plugins.contract.step import CACHE
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS, LENGTHS
from trt_lora.runtime.memory.dtypes import Array

ROTARY_EMBEDDING = "RotaryEmbedding"

_NEW = 2  # tokens of the steps that a table is compared with


class RotaryEmbeddings(ir.passes.InPlacePass):
    """The pass, for a graph whose cache is static, of opset 23 or later."""

    def requires(self, model: ir.Model) -> None:
        """The opset has the operator; token ids, lengths and a cache of one length are inputs."""
        gv.require_opset(model, 23)
        gv.require_inputs(model, INPUT_IDS, LENGTHS)
        caches = [value for value in model.graph.inputs if str(value.name).startswith(CACHE)]
        gv.require(bool(caches) and gv.has_size(caches[0], 2), "there is no cache of one length")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        tables = _Tables(model)
        rotation: Any = _Rotation
        apply_rules(model, pattern.RewriteRuleSet([rotation.rule(tables)], commute=True))
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=tables.any)

    def ensures(self, model: ir.Model) -> None:
        """Every embedding reads two tables."""
        for node in (node for node in model.graph if node.op_type == ROTARY_EMBEDDING):
            tables = [value is not None and value.is_initializer() for value in node.inputs[1:3]]
            gv.ensure(all(tables), f"{node.name} reads no tables")


class _Tables:
    """Tables [max_len, dim / 2] of what the graph computes for a token from its place."""

    def __init__(self, model: ir.Model) -> None:
        inputs = {str(value.name): value for value in model.graph.inputs}
        cache = next(value for name, value in inputs.items() if name.startswith(CACHE))
        self.places = _places(model.graph, inputs[INPUT_IDS], inputs[LENGTHS])
        self._model, self._max_len = model, gv.size_of(cache, 2)
        self._made = dict[ir.Value, ir.Value | None]()

    @property
    def any(self) -> bool:
        """Whether there is a table."""
        return any(table is not None for table in self._made.values())

    def of(self, value: ir.Value, x: ir.Value) -> ir.Value | None:
        """Return the table of a value [batch, 1, s, dim], to turn x; None where it has none."""
        if value not in self._made:
            rows = self._rows(value, gv.size_of(x, 3))
            self._made[value] = None if rows is None else self._initializer(rows, value, x)
        return self._made[value]

    def _rows(self, value: ir.Value, size: int) -> Array | None:
        """Half of the value for every place, if its halves are equal and the place decides it."""
        lengths = np.unique([0, self._max_len // 2, self._max_len - _NEW])
        every = self._evaluated(value, np.zeros(1, np.int64), self._max_len, self._max_len, size)
        steps = self._evaluated(value, lengths, _NEW, _NEW, size)
        if every is None or steps is None:
            return None
        expected = every[0, 0, lengths[:, None] + np.arange(_NEW)]
        left, right = np.split(every[0, 0], 2, axis=-1)
        is_table = np.array_equal(steps[:, 0], expected) and np.array_equal(left, right)
        return np.ascontiguousarray(left) if is_table else None

    def _evaluated(
        self, value: ir.Value, lengths: Array, new: int, bound: int, size: int
    ) -> Array | None:
        found = evaluated(self._model, value, lengths, new, bound)
        has_shape = found is not None and found.shape == (len(lengths), 1, new, size)
        return found if has_shape else None

    def _initializer(self, rows: Array, value: ir.Value, x: ir.Value) -> ir.Value:
        dtype = gv.present(x.dtype)
        tensor = ir.tensor(rows, dtype=dtype, name=f"{value.name}_table")
        kind, shape = ir.TensorType(dtype), ir.Shape(rows.shape)
        table = ir.Value(name=tensor.name, type=kind, shape=shape, const_value=tensor)
        self._model.graph.register_initializer(table)
        return table


class _Rotation(pattern.RewriteRuleClassBase):
    """x [batch, heads, s, dim], cos and sin [batch, 1, s, dim]."""

    def __init__(self, tables: _Tables) -> None:
        super().__init__(remove_nodes=False)  # other layers read them too
        self._tables = tables

    def pattern(self, op: Any, x: Any, cos: Any, sin: Any, half: Any, end: Any) -> Any:
        first = op.Slice(x, [0], half, [3], [1])
        second = op.Slice(x, half, end, [3], [1])
        turned = op.Concat(op.Neg(second), first, axis=-1)
        return op.Add(op.Mul(x, cos), op.Mul(turned, sin))

    def check(  # type: ignore[override] # the rewriter calls it by name
        self, context: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, half: ir.Value, end: ir.Value
    ) -> bool:
        del context  # the rewriter's own
        if x.shape is None or len(x.shape) != 4 or not x.dtype == cos.dtype == sin.dtype:
            return False
        size, middle, last = x.shape[3], gv.number(half), gv.number(end)
        if middle is None or last is None or size != 2 * middle or last < 2 * middle:
            return False
        return all(self._tables.of(value, x) is not None for value in (cos, sin))

    def rewrite(
        self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value, half: ir.Value, end: ir.Value
    ) -> Any:
        del half, end
        tables = [self._tables.of(value, x) for value in (cos, sin)]
        return op.RotaryEmbedding(x, *tables, self._tables.places)


def _places(graph: ir.Graph, ids: ir.Value, lengths: ir.Value) -> ir.Value:
    """Compute the place of every new token [batch, s], before all else."""
    tape = Tape()
    new = tape.op("Squeeze", [tape.op("Shape", [ids], {"start": 1, "end": 2})])
    steps = tape.op("Range", [gv.constant(tape, 0), new, gv.constant(tape, 1)])
    places = tape.op("Add", [tape.op("Unsqueeze", [lengths, gv.constant(tape, [1])]), steps])
    graph.insert_before(graph[0], gv.unnamed(tape))
    return places
