"""Group linears that share an input into one LoRA node, in the form with the fewest kernels.

Every node is one kernel. What else it costs depends on what TensorRT can still fuse; the builder's
own kernel lists decided these rules (docs/benchmarks/kernels.md):

1. A linear whose output only meets the residual, `y + r`: the node adds to r before the linear
   runs, `y + (r + delta)`. The Add is the one that was there: one kernel more in all.
2. An output that meets elementwise work: the node returns the delta, and the Add that follows
   fuses into that work.
3. Any other: the node adds to the output itself. In cases 1 and 2 this form would cost copies,
   because linears that TensorRT has merged write one tensor and the node reads several.

A bias counts as part of its linear: the delta is added after it. With vectors behind every site
(`special_sites/site_vectors.py`) all meet elementwise work, and the bias comes behind that. The
delta of a convolution is returned too: its channels are moved to the front before it is added.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.linears import Linear, source_of
from trt_lora.builder.passes.windows import Window
from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.contract.sites import MAX_SITES

_VIEWS = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "Slice"})
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg", "Exp", "Cast", "Clip", "Where"}
    | {"Relu", "Sigmoid", "Tanh", "Erf", "Gelu", "Swish"}
    | {"LayerNormalization", "RMSNormalization", "RotaryEmbedding"}  # begin so
    | {"Concat"}  # the copy into the cache fuses with what makes its operand
)


class Operand(NamedTuple):
    """An input of a node."""

    node: ir.Node
    position: int

    @property
    def value(self) -> ir.Value:
        """The value that the node reads there."""
        return gv.present(self.node.inputs[self.position])


@dataclass(frozen=True)
class LinearGroup:
    """Linears that read the same x, in the order of the graph, and where their deltas go."""

    linears: tuple[Linear, ...]
    outputs: tuple[ir.Value, ...]  # of each linear, behind its bias
    residual: Operand | None = None  # form 1: what the Add behind the only linear adds
    returns_delta: bool = False  # form 2

    @property
    def operator(self) -> Operator:
        """The LoRA operator that computes the group."""
        return Operator(len(self.linears), has_addend=not self.returns_delta)

    @property
    def x(self) -> ir.Value:
        """The input of all linears, before any rounding."""
        return source_of(self.linears[0].x)

    @property
    def window(self) -> Window | None:
        """What all members read of x where they are convolutions."""
        return self.linears[0].window


def make_groups(linears: Iterable[Linear], *, with_vectors: bool = False) -> list[LinearGroup]:
    """Group linears by the value that they read; at most `MAX_SITES` in one."""
    by_x: dict[tuple[ir.Value, Window | None], list[Linear]] = {}
    for linear in linears:
        by_x.setdefault((source_of(linear.x), linear.window), []).append(linear)
    return [
        _delta_group(some) if with_vectors or window else _group(some)
        for (_, window), linears_of_x in by_x.items()
        for some in _batched(linears_of_x)
    ]


def _batched(linears: Sequence[Linear]) -> Iterator[Sequence[Linear]]:
    for start in range(0, len(linears), MAX_SITES):
        yield linears[start : start + MAX_SITES]


def _delta_group(linears: Sequence[Linear]) -> LinearGroup:
    return LinearGroup(tuple(linears), tuple(each.y for each in linears), returns_delta=True)


def _group(linears: Sequence[Linear]) -> LinearGroup:
    members, outputs = tuple(linears), tuple(_behind_bias(linear.y) for linear in linears)
    if len(members) == 1 and (residual := _residual(outputs[0])):
        return LinearGroup(members, outputs, residual=residual)
    return LinearGroup(members, outputs, returns_delta=any(map(_meets_elementwise, outputs)))


def _behind_bias(y: ir.Value) -> ir.Value:
    other = _added(y)
    if other is None or other.value.const_value is None:
        return y
    return other.node.outputs[0]


def _residual(y: ir.Value) -> Operand | None:
    """The other addend of y, if it is not computed from y and has its type and shape."""
    other = _added(y)
    if other is None or other.value.const_value is not None:
        return None
    same_type = other.value.dtype == y.dtype
    return other if same_type and _same_shape(other.value, y) else None


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Return whether two values certainly have one shape: an Add may broadcast, a node must not."""
    if one.shape is None or other.shape is None or one.shape != other.shape:
        return False
    return not any(one.shape.is_unknown_dim(axis) for axis in range(len(one.shape)))


def _added(y: ir.Value) -> Operand | None:
    """The other operand of an Add that alone reads y."""
    uses = tuple(y.uses())
    if len(uses) != 1 or y.is_graph_output() or uses[0].node.op_type != "Add":
        return None
    return Operand(uses[0].node, 1 - uses[0].idx)


def _meets_elementwise(y: ir.Value) -> bool:
    """Return whether elementwise work reads y, directly or through views of it."""
    for use in y.uses():
        if use.node.op_type in _ELEMENTWISE:
            return True
        if use.node.op_type in _VIEWS and any(map(_meets_elementwise, use.node.outputs)):
            return True
    return False
