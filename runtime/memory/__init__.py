"""Tensors and their memory, on host and device."""
