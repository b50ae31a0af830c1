"""ONNX models as TensorRT parses them: bytes, whose weights lie in a file beside them.

Attention gets TensorRT's own attribute, which ONNX Runtime refuses. Without it TensorRT does not
build float32 attention: it has a fused kernel for decoding alone, and may fall back to matrix
products only where the attribute says so. Codes get the form that TensorRT takes.
"""

from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes.lowering.multiply_side_by_side import MultiplySideBySide
from trt_lora.builder.passes.lowering.sign_codes import SignCodes
from trt_lora.builder.passes.lowering.standard_attention import ATTENTION
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.manifest import ONNX_WEIGHTS_FILE

_ATTRIBUTE = "TRT_decomposable"


def parsed_form(model: ir.Model, onnx: Path, scratch: Path) -> tuple[bytes, Path]:
    """Return a model as TensorRT parses it, and the path beside which its weights lie.

    Args:
        model: of that file or made of it; its codes are lowered in place.
        onnx: a file whose folder holds the model's weights.
        scratch: a folder, which gets all weights where codes have another form than beside `onnx`.

    Raises:
        ModelError: it has codes that TensorRT does not multiply by.
    """
    try:
        has_codes = SignCodes()(model).modified
    except ir.passes.PreconditionError as error:
        cure = "build it again with --flavour tensorrt-rtx or tensorrt"
        raise ModelError(f"{onnx.name} makes no plan: {error}; {cure}") from error
    if not has_codes:
        return onnx_bytes(model), onnx
    MultiplySideBySide()(model)
    own = scratch / onnx.name
    ir.save(model, own, external_data=ONNX_WEIGHTS_FILE)
    return onnx_bytes(ir.load(own)), own


def onnx_bytes(model: ir.Model) -> bytes:
    """Return a model with the attribute; its weights are not read."""
    for node in model.graph:
        if node.op_type == ATTENTION and not node.domain:
            node.attributes[_ATTRIBUTE] = ir.AttrInt64(_ATTRIBUTE, 1)
    data: bytes = ir.to_proto(model).SerializeToString()
    return data
