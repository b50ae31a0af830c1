"""The GPU benchmark: what `make gpu` checks and measures."""
