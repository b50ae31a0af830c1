"""TensorRT and TensorRT-RTX backend."""
