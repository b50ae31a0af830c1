"""Adapters that HTTP loads, names and calls: where they may come from, and what is said of them."""
