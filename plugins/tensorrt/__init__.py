"""The LoRA operators as TensorRT plugins."""
