"""The engine on TensorRT and TensorRT-RTX."""
