"""Pipelines of diffusers on engines: the only folder of the runtime that imports torch."""
