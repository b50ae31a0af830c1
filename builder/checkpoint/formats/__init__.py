"""Formats of quantised checkpoints: a linear's tensors, and the weight that they are."""
