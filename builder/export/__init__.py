"""Export of a transformers model to ONNX."""
