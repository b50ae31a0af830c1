"""Everything that is refused before a weight is read."""
