"""Base model checkpoints: directory, config files and weights."""
