"""A weight in codes of 4 or 8 bits, and the `DequantizeLinear` that reads it in a graph."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.runtime.memory.dtypes import Array

Codes = npt.NDArray[np.uint8]

E4M3 = ml_dtypes.float8_e4m3fn
FLOAT8_MAX, NVFP4_MAX = 448, 6  # of E4M3, of E2M1
_OPERATOR = "DequantizeLinear"
_NIBBLE = 4  # bits


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """W [n, k] of a linear: `(code - zero) * scale`, a zero and a scale for each block of k.

    https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html, blocked along axis 1. Codes may be
    floats of 8 bits (E4M3), which have no zeros: `code * scale`. So are NVFP4's: E4M3 has all that
    E2M1 has, and ONNX Runtime reads no E2M1.
    """

    bits: int  # of a code: 4 or 8
    block: int  # values along k that share a scale; divides k
    codes: Codes  # [n, k * bits / 8]; of two codes in a byte the first has the low half
    scales: Array  # [n, k / block], in the dtype of the activations
    zeros: Codes | None = None  # [n, k / block], a byte each; None: 2 ** (bits - 1) everywhere
    order: npt.NDArray[np.int64] | None = None  # [k], places in k of the codes; None: as they lie
    is_float: bool = False  # codes of 8 bits are E4M3
    factors: Array | None = None  # [k], of columns of W, or of x as the codes take it; None: 1
    x_scale: Array | None = None  # [], of x in the same codes, which products read; None: x as is
    # NVFP4's E4M3 [n, k / block] and float32 [], whose products, rounded, the scales are.
    parts: tuple[Array, Array] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k] of the weight."""
        n, width = self.codes.shape
        return n, width * 8 // self.bits

    @property
    def largest(self) -> float:
        """Return a bound of the magnitude of a code less its zero."""
        if self.parts is not None:
            return NVFP4_MAX
        return FLOAT8_MAX if self.is_float else 1 << self.bits

    def dequantised(self) -> Array:
        """Return the weight [n, k] in the dtype of its scales, rounded as the operator rounds."""
        steps = self._steps().reshape(*self.scales.shape, self.block)
        values = (steps.astype(self.scales.dtype) * self.scales[:, :, None]).reshape(self.shape)
        values = values if self.order is None else values[:, np.argsort(self.order)]
        return values if self.factors is None else values * self.factors

    def _steps(self) -> Array:
        """Codes less their zeros."""
        if self.is_float:
            return self.codes.view(E4M3)
        codes = unpacked(self.codes) if self.bits == _NIBBLE else self.codes
        zeros = 1 << self.bits - 1 if self.zeros is None else self.zeros[:, :, None].astype(int)
        return codes.reshape(*self.scales.shape, self.block).astype(np.int16) - zeros

    def split(self, block: int) -> "CodedWeight":
        """Return it in smaller blocks, with each scale and zero as often as it is then needed."""
        times = self.block // block
        zeros = None if self.zeros is None else np.repeat(self.zeros, times, axis=1)
        return replace(self, block=block, scales=np.repeat(self.scales, times, axis=1), zeros=zeros)


def packed(codes: Codes) -> Codes:
    """Return codes of 4 bits [.., k] two in a byte [.., ceil(k / 2)], the first in the low half."""
    even = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    both: Codes = np.bitwise_or(even[..., 0::2], np.left_shift(even[..., 1::2], _NIBBLE))
    return both


def unpacked(both: Codes) -> Codes:
    """Return the codes [.., 2 k] of bytes [.., k] with two in each."""
    low, high = np.bitwise_and(both, 15), np.right_shift(both, _NIBBLE)
    codes: Codes = np.stack([low, high], -1).reshape(*both.shape[:-1], -1)
    return codes


def write_coded(graph: ir.Graph, path: str, weight: CodedWeight) -> list[ir.Node]:
    """Return nodes, not yet in the graph, the last of which makes the weight [n, k] of its codes.

    Args:
        graph: gets the initializers `<path>.codes`, `.scales`, `.zeros`, `.places` and `.factors`;
            integers without zeros of their own share those of their shape.
        path: of the linear's module.
        weight: as it is to be read.
    """
    scales, makers = write_scales(graph, path, weight)
    operands = [gv.initializer(graph, f"{path}.codes", _codes_of(weight)), scales]
    if not weight.is_float:
        operands.append(_zeros(graph, path, weight))
    nodes = [ir.node(_OPERATOR, operands, {"axis": 1, "block_size": weight.block})]
    if weight.order is not None:
        places = gv.initializer(graph, f"{path}.places", ir.tensor(np.argsort(weight.order)))
        nodes.append(ir.node("Gather", [nodes[0].outputs[0], places], {"axis": 1}))
    if weight.factors is not None:
        factors = gv.initializer(graph, f"{path}.factors", ir.tensor(weight.factors))
        nodes.append(ir.node("Mul", [nodes[-1].outputs[0], factors]))
    for node in nodes:
        result = node.outputs[0]
        result.type, result.shape = scales.type, ir.Shape(weight.shape)
    return [*makers, *nodes]


def write_scales(
    graph: ir.Graph, prefix: str, weight: CodedWeight
) -> tuple[ir.Value, list[ir.Node]]:
    """Return the scales of a weight, and the nodes, not yet in the graph, that make them of parts.

    Args:
        graph: gets `<prefix>.scales`, or, of parts, `.fine_scales` and `.unit`.
        prefix: of their names.
        weight: that they are of.
    """
    if weight.parts is None:
        return gv.initializer(graph, f"{prefix}.scales", ir.tensor(weight.scales)), []
    named = zip(("fine_scales", "unit"), weight.parts, strict=True)
    parts = [gv.initializer(graph, f"{prefix}.{end}", ir.tensor(part)) for end, part in named]
    dtype = ir.DataType.from_numpy(weight.scales.dtype)
    product = ir.node(_OPERATOR, parts)
    rounded = ir.node("Cast", [product.outputs[0]], {"to": dtype})
    for node, own in ((product, parts[1].dtype), (rounded, dtype)):
        node.outputs[0].type = ir.TensorType(gv.present(own))
        node.outputs[0].shape = parts[0].shape
    return rounded.outputs[0], [product, rounded]


def _zeros(graph: ir.Graph, path: str, weight: CodedWeight) -> ir.Value:
    n, blocks = weight.scales.shape
    values, name = weight.zeros, f"{path}.zeros"
    if values is None:
        values, name = np.full((n, blocks), 1 << weight.bits - 1, np.uint8), f"zeros_{n}_{blocks}"
    zeros = packed(values.reshape(1, -1)) if weight.bits == _NIBBLE else values
    tensor = _code_tensor(zeros, weight.bits, (n, blocks))
    return gv.initializer(graph, f"{name}_{weight.bits}", tensor)


def decoding(value: ir.Value | None) -> ir.Node | None:
    """Return the node that decodes the codes of a weight; None: it is something else."""
    *_, node = (None, *_makers(value))
    return node if node is not None and _decodes(node) else None


def _decodes(node: ir.Node) -> bool:
    """Whether a node decodes codes that the graph holds, not those of an x that it rounds."""
    if node.op_type != _OPERATOR or "block_size" not in node.attributes:  # or it makes scales
        return False
    return gv.present(node.inputs[0]).const_value is not None


def _makers(value: ir.Value | None) -> Iterator[ir.Node]:
    """The nodes that make a weight, the last one first."""
    node = None if value is None else value.producer()
    while node is not None:
        yield node
        node = gv.present(node.inputs[0]).producer() if _is_column_change(node) else None


def read_coded(value: ir.Value | None) -> CodedWeight | None:
    """Return the coded weight that a value is; None where it is something else."""
    node = decoding(value)
    if node is None or value is None:
        return None
    changes = {each.op_type: gv.present(each.inputs[1]).const_value for each in _makers(value)}
    places, factors = changes.get("Gather"), changes.get("Mul")
    codes, *zeros = (gv.present(v.const_value) for v in (node.inputs[0], *node.inputs[2:]) if v)
    scales, parts = _read_scales(gv.present(node.inputs[1]))
    bits, (n, blocks) = codes.dtype.bitwidth, scales.shape
    return CodedWeight(
        bits,
        node.attributes["block_size"].as_int(),
        _bytes(codes).reshape(n, -1),
        scales,
        _points(zeros[0], bits, (n, blocks)) if zeros else None,
        None if places is None else np.argsort(places.numpy()),
        codes.dtype == ir.DataType.FLOAT8E4M3FN,
        None if factors is None else factors.numpy(),
        parts=parts,
    )


def _read_scales(value: ir.Value) -> tuple[Array, tuple[Array, Array] | None]:
    """Scales, and their parts where the graph makes them of those."""
    if value.const_value is not None:
        return value.const_value.numpy(), None
    product = gv.present(gv.present(gv.present(value.producer()).inputs[0]).producer())
    fine, unit = (gv.present(gv.present(v).const_value).numpy() for v in product.inputs)
    return multiplied(fine, unit, gv.present(value.dtype).numpy()), (fine, unit)


def multiplied(fine: Array, unit: Array, dtype: npt.DTypeLike) -> Array:
    """Return the scales that two parts are, rounded to a dtype as the graph does."""
    return (fine.astype(unit.dtype) * unit).astype(dtype)


def _points(zeros: ir.TensorProtocol, bits: int, shape: tuple[int, int]) -> Codes | None:
    """Zeros, a byte each; None where all are the middle code."""
    points = _bytes(zeros)
    points = (unpacked(points) if bits == _NIBBLE else points)[: shape[0] * shape[1]].reshape(shape)
    return None if (points == 1 << bits - 1).all() else points


def coded_values(model: ir.Model) -> Iterator[tuple[str, ir.Value]]:
    """Yield the weights of an engine's graph that are of codes, each behind its linear's path."""
    for node in model.graph:
        if _decodes(node):
            path, value = str(gv.present(node.inputs[0]).name), node.outputs[0]
            while changes := [user for user in value.consumers() if _is_column_change(user)]:
                value = changes[0].outputs[0]
            yield path.removesuffix(".codes"), value


def coded_weights(model: ir.Model) -> Iterator[tuple[str, CodedWeight]]:
    """Yield the coded weights of an engine's graph, each behind the path of its linear."""
    for path, value in coded_values(model):
        yield path, gv.present(read_coded(value))


def _is_column_change(node: ir.Node) -> bool:
    """Whether a node moves columns of a weight, or multiplies them; rows are an embedding's."""
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) == 1
    return node.op_type == "Mul" and str(gv.present(node.inputs[1]).name).endswith(".factors")


def _bytes(tensor: ir.TensorProtocol) -> Codes:
    """The bytes of codes as they lie in memory; codes of 7B would be gigabytes a second time."""
    if isinstance(tensor, ir.PackedTensor):
        return tensor.numpy_packed().reshape(-1)
    if tensor.dtype.bitwidth >= 8:
        return tensor.numpy().reshape(-1).view(np.uint8)
    return np.frombuffer(tensor.tobytes(), np.uint8)  # of a file, two in a byte


def _codes_of(weight: CodedWeight) -> ir.TensorProtocol:
    if weight.is_float:
        return ir.tensor(weight.codes.view(E4M3))
    return _code_tensor(weight.codes, weight.bits, weight.shape)


def _code_tensor(codes: Codes, bits: int, shape: tuple[int, int]) -> ir.TensorProtocol:
    if bits == _NIBBLE:
        return ir.PackedTensor(codes.reshape(-1), ir.DataType.UINT4, shape=ir.Shape(shape))
    return ir.tensor(codes)
