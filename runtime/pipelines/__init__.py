"""Engines of the components of one diffusion pipeline, under one name of every adapter."""
