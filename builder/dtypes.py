"""ONNX data types by the names that manifests, numpy and torch use."""

import onnx_ir as ir

_ONNX_ALIASES = {"float": "float32", "double": "float64"}  # ONNX names them after C


def dtype_name(dtype: ir.DataType) -> str:
    """Return `float32` for FLOAT, `bfloat16` for BFLOAT16, `int64` for INT64."""
    name = dtype.name.lower()
    return _ONNX_ALIASES.get(name, name)


def onnx_dtype(name: str) -> ir.DataType:
    """Return the type that `dtype_name` calls `name`."""
    onnx_name = next((onnx for onnx, ours in _ONNX_ALIASES.items() if ours == name), name)
    return ir.DataType[onnx_name.upper()]
