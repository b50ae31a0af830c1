"""Benchmarks of denoisers and text encoders of diffusion pipelines."""
