"""A base model on disk: its directory, config files and weights, read and compared."""
