"""LoRA inside an engine: the binding contract, the CUDA kernels and the TensorRT plugins."""
