"""CUDA LoRA kernels: launch plans, NVRTC compilation and launches."""
