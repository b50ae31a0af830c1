"""Graph rewrites, each an onnx_ir pass."""
