"""GPU benchmark of `make gpu`: correctness and speed."""
