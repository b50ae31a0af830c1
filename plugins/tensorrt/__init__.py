"""LoRA operators as TensorRT plugins."""
