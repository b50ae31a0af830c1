"""Readers of untrusted files: bounded, type-checked, and safe against concurrent writes."""
