"""An engine of any ONNX graph: options, shapes, and the directory."""
