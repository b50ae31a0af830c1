"""Workloads of the GPU benchmark, one file each."""
