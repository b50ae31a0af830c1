"""An ONNX graph becomes a TensorRT plan."""
