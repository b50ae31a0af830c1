"""A transformers model becomes an ONNX graph."""
