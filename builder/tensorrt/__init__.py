"""Compilation of an ONNX graph to a TensorRT plan."""
