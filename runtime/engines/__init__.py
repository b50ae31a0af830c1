"""Engines on TensorRT and ONNX Runtime."""
