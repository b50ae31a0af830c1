"""ONNX models as TensorRT parses them: bytes, whose weights lie in a file beside them.

Attention gets TensorRT's own attribute, which ONNX Runtime refuses. Without it TensorRT does not
build float32 attention: it has a fused kernel for decoding alone, and may fall back to matrix
products only where the attribute says so.
"""

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from trt_lora.builder.passes.lowering.standard_attention import ATTENTION

_ATTRIBUTE = "TRT_decomposable"


def with_decomposable_attention(model: bytes) -> bytes:
    """Return an ONNX model, whose weights lie beside it, with the attribute."""
    try:
        graph = parsed_onnx(model)
    except DecodeError:
        return model  # TensorRT's parser says what is wrong with it
    nodes = [node for node in graph.graph if node.op_type == ATTENTION and not node.domain]
    for node in nodes:
        node.attributes[_ATTRIBUTE] = ir.AttrInt64(_ATTRIBUTE, 1)
    return onnx_bytes(graph) if nodes else model


def parsed_onnx(model: bytes) -> ir.Model:
    """Return the model; its weights are not read."""
    parsed: ir.Model = ir.from_proto(onnx.ModelProto.FromString(model))
    return parsed


def onnx_bytes(model: ir.Model) -> bytes:
    """Return the model as bytes."""
    data: bytes = ir.to_proto(model).SerializeToString()
    return data
