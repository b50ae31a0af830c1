"""The CUDA kernels: planned, compiled and launched."""
