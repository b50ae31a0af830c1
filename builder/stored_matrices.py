"""Where the weights of an engine's sites lie in its file of weights."""

from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.site_calls import SiteCall, site_calls
from trt_lora.runtime.files.stored_matrix import StoredMatrix


def stored_matrices(file: Path) -> dict[str, StoredMatrix]:
    """Return the weight of every site of an ONNX file, by its path, where that is one of floats."""
    found = ((call.path, _stored(call)) for call in site_calls(ir.load(file)))
    return {path: matrix for path, matrix in found if matrix is not None}


def _stored(call: SiteCall) -> StoredMatrix | None:
    value, attributes = gv.present(call.linear.inputs[1]), call.linear.attributes
    turned = bool(attributes.get_int("transB", 0))
    node = value.producer()
    if node is not None and node.op_type == "Transpose":  # of a weight with other readers
        value, turned = gv.present(node.inputs[0]), not turned
    tensor = value.const_value
    is_whole = attributes.get_float("alpha", 1.0) == 1
    if not isinstance(tensor, ir.ExternalTensor) or len(tensor.shape) != 2 or not is_whole:
        return None
    rows, width = tensor.shape.numpy()
    k, n = (width, rows) if turned else (rows, width)
    return StoredMatrix(tensor.offset or 0, tensor.dtype.numpy().name, k, n, turned)
