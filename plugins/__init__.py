"""What LoRA is inside an engine: the contract, the modules it may target, the TensorRT flavours."""
