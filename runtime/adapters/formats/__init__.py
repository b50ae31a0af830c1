"""Adapter file formats, one module each."""
