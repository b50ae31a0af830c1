"""ONNX models as bytes, whose weights lie in a file beside them."""

import onnx
import onnx_ir as ir


def parsed_onnx(model: bytes) -> ir.Model:
    """Return the model; its weights are not read."""
    parsed: ir.Model = ir.from_proto(onnx.ModelProto.FromString(model))
    return parsed


def onnx_bytes(model: ir.Model) -> bytes:
    """Return the model as bytes."""
    data: bytes = ir.to_proto(model).SerializeToString()
    return data
