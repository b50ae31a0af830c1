"""The engine on ONNX Runtime."""
