"""Names and shapes that engine, adapter and kernel agree on."""
