"""Measurements of what serves many adapters: the cache, the scheduler."""
