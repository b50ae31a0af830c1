"""ONNX data types by the names that manifests, numpy and torch use."""

import onnx_ir as ir

_ONNX_ALIASES = {"FLOAT": "float32", "DOUBLE": "float64"}  # ONNX names them after C


def dtype_name(dtype: ir.DataType) -> str:
    """Return `float32` for FLOAT, `bfloat16` for BFLOAT16, `int64` for INT64."""
    return _ONNX_ALIASES.get(dtype.name, dtype.name.lower())


def onnx_dtype(name: str) -> ir.DataType:
    """Return the type that `dtype_name` calls `name`."""
    return next(dtype for dtype in ir.DataType if dtype_name(dtype) == name)
