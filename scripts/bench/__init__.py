"""Benchmarks: `make bench` on a CPU, `make gpu` on an NVIDIA GPU."""
