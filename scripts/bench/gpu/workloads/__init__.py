"""The questions of the GPU benchmark, one file each: rows, and what is expected of them."""
