"""Where the weights and biases of an engine's sites lie in its file of weights."""

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.site_calls import SiteCall, site_calls
from trt_lora.runtime.files.stored_matrix import StoredMatrix, bias_of


def stored_matrices(file: Path, tables: Mapping[str, str]) -> dict[str, StoredMatrix]:
    """Return weight and bias of every site of an ONNX file, where they are floats.

    By the site's path, and by `bias_of` it; biases are those behind vectors.

    Args:
        file: of an engine in the making.
        tables: LoRA inputs A of its embeddings and heads whose delta is no node, by path.
    """
    model = ir.load(file)
    found = [
        matrix
        for call in site_calls(model)
        for matrix in ((call.path, _weight(call.linear)), (bias_of(call.path), _bias(call)))
    ]
    inputs = {str(value.name): value for value in model.graph.inputs}
    found += [(path, _table(inputs[name])) for path, name in tables.items()]
    return {path: matrix for path, matrix in found if matrix is not None}


def _table(a: ir.Value) -> StoredMatrix | None:
    """What the embedding or head reads whose delta is made of A."""
    ((node, place),) = a.uses()
    while node.op_type != "Add":
        ((node, place),) = node.outputs[0].uses()
    reader = gv.present(gv.present(node.inputs[1 - place]).producer())
    if reader.op_type != "Gather":
        return _weight(reader)
    tensor = gv.present(reader.inputs[0]).const_value
    if not isinstance(tensor, ir.ExternalTensor):  # codes
        return None
    return _at(tensor, *tensor.shape.numpy())


def base_bias(call: SiteCall) -> ir.TensorProtocol | None:
    """Return what a site adds behind its vectors; None where that is no constant."""
    value: ir.Value | None = call.output
    for operator in ("Mul", "Add", "Add"):  # the scale, the adapter's bias, the base model's
        uses = [] if value is None else [*value.uses()]
        if len(uses) != 1 or uses[0].node.op_type != operator:
            return None
        added, value = uses[0].node.inputs[1 - uses[0].idx], uses[0].node.outputs[0]
    return None if added is None else added.const_value


def _bias(call: SiteCall) -> StoredMatrix | None:
    tensor = base_bias(call)
    if tensor is None or len(tensor.shape) != 1:
        return None
    return _at(tensor, 1, tensor.size)


def _weight(linear: ir.Node) -> StoredMatrix | None:
    value, attributes = gv.present(linear.inputs[1]), linear.attributes
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
    return _at(tensor, k, n, is_turned=turned)


def _at(tensor: ir.TensorProtocol, k: int, n: int, *, is_turned: bool = False) -> StoredMatrix:
    dtype = tensor.dtype.numpy().name
    if isinstance(tensor, ir.ExternalTensor):
        return StoredMatrix(tensor.offset or 0, dtype, k, n, is_turned)
    return StoredMatrix(0, dtype, k, n, is_turned, tensor.tobytes().hex())
