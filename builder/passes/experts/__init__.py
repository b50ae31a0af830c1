"""Experts of a mixture: their LoRA inputs, and their forms in standard operators."""
