"""Tensors, and where their bytes lie."""
