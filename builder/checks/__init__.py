"""Checks of a base model before any weight is read."""
