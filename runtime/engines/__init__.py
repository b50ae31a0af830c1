"""Running an engine."""
