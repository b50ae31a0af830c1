"""Weights that are codes, and x as products by them take it."""
