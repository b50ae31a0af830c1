"""Slots of an engine for many adapters, and the host memory above them."""
