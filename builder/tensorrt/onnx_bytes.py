"""ONNX models as TensorRT parses them: bytes, whose weights lie in a file beside them.

Attention gets TensorRT's own attribute, which ONNX Runtime refuses. Without it TensorRT does not
build float32 attention: it has a fused kernel for decoding alone, and may fall back to matrix
products only where the attribute says so.
"""

import onnx_ir as ir

from trt_lora.builder.passes.lowering.standard_attention import ATTENTION

_ATTRIBUTE = "TRT_decomposable"


def onnx_bytes(model: ir.Model) -> bytes:
    """Return a model with the attribute; its weights are not read."""
    for node in model.graph:
        if node.op_type == ATTENTION and not node.domain:
            node.attributes[_ATTRIBUTE] = ir.AttrInt64(_ATTRIBUTE, 1)
    data: bytes = ir.to_proto(model).SerializeToString()
    return data
