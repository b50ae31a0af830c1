"""Pass that makes one product of those that read one x, where their weights are codes.

TensorRT does so with float weights, and with none that it dequantises: of q, k and v each would
cost a kernel.

1. MatMuls of one x whose weights are `Transpose(DequantizeLinear(codes, scales))`, of the same
   blocks, become one: codes and scales [n, ..] one below the other. A Split gives each its y.
   So do those whose scales are made of [n, ..] times the same number.
2. Left alone is a Gemm, and a weight that is read twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.passes import graph_values as gv


class MultiplySideBySide(ir.passes.InPlacePass):
    """The pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        groups: dict[tuple[Any, ...], list[_Product]] = {}
        for node in model.graph:
            if (product := _read(node)) is not None:
                groups.setdefault(product.key, []).append(product)
        shared = [products for products in groups.values() if len(products) > 1]
        for products in shared:
            _join(model.graph, products)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(shared))


@dataclass(frozen=True)
class _Product:
    node: ir.Node  # the MatMul
    decoding: ir.Node  # the DequantizeLinear
    scaling: Sequence[ir.Node]  # what makes its scales, the last one first; none: a constant

    @property
    def key(self) -> tuple[Any, ...]:
        """What products have in common that can be one."""
        attributes = self.decoding.attributes
        block = attributes.get_int("axis", 1), attributes.get_int("block_size", 0)
        units = [gv.number(value) for node in self.scaling for value in node.inputs[1:]]
        return self.node.inputs[0], _tensor(self.codes).dtype, *block, *units

    @property
    def n(self) -> int:
        """Its width."""
        return gv.size_of(self.decoding.outputs[0], 0)

    @property
    def codes(self) -> ir.Value:
        """Its codes [n, k]."""
        return gv.present(self.decoding.inputs[0])

    @property
    def scales(self) -> ir.Value:
        """The constant [n, ..] that its scales are, or are made of."""
        *_, last = (self.decoding.inputs[1], *(node.inputs[0] for node in self.scaling))
        return gv.present(last)


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    return gv.present(value.const_value)


def _read(node: ir.Node) -> _Product | None:
    """The product that a node is; None where it is another, or not the only one of its weight."""
    if node.op_type != "MatMul" or node.domain:
        return None
    transpose = gv.present(node.inputs[1]).producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    made = gv.present(transpose.inputs[0]).producer()
    if made is None or made.op_type != "DequantizeLinear" or len(made.inputs) != 2:
        return None
    is_read_once = all(len(each.outputs[0].uses()) == 1 for each in (transpose, made))
    return _Product(node, made, [*_makers(made.inputs[1])]) if is_read_once else None


def _makers(value: ir.Value | None) -> Iterator[ir.Node]:
    while value is not None and (node := value.producer()):
        yield node
        value = node.inputs[0]


def _join(graph: ir.Graph, products: Sequence[_Product]) -> None:
    first, name = products[0], str(products[0].node.outputs[0].name)
    codes = gv.initializer(graph, f"{name}.codes", _stacked([each.codes for each in products]))
    scales = gv.initializer(graph, f"{name}.scales", _stacked([each.scales for each in products]))
    makers = list[ir.Node]()
    for node in reversed(first.scaling):
        makers.append(ir.node(node.op_type, [scales, *node.inputs[1:]], node.attributes))
        scales = makers[-1].outputs[0]
    decoding = ir.node("DequantizeLinear", [codes, scales], first.decoding.attributes)
    transpose = ir.node("Transpose", [decoding.outputs[0]], {"perm": [1, 0]})
    product = ir.node("MatMul", [first.node.inputs[0], transpose.outputs[0]])
    widths = gv.initializer(graph, f"{name}.widths", ir.tensor([each.n for each in products]))
    operands = [product.outputs[0], widths]
    split = ir.node("Split", operands, {"axis": -1}, num_outputs=len(products))
    graph.insert_before(first.node, [*makers, decoding, transpose, product, split])
    for each, y in zip(products, split.outputs, strict=True):
        gv.replace_node(each.node, [], y)


def _stacked(values: Sequence[ir.Value]) -> ir.TensorProtocol:
    """Constants [n, ..] one below the other."""
    tensors = [*map(_tensor, values)]
    dtype, rows = tensors[0].dtype, [each.shape.numpy() for each in tensors]
    if dtype.bitwidth >= 8:
        return ir.tensor(np.concatenate([each.numpy() for each in tensors]))
    data = np.frombuffer(b"".join(each.tobytes() for each in tensors), np.uint8)
    return ir.PackedTensor(data, dtype, shape=(sum(n for n, _ in rows), rows[0][1]))
