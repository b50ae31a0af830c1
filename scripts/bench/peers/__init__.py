"""Decode and prompt time on a CPU, beside other ways to run a model with a LoRA adapter."""
