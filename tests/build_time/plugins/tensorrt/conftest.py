"""Fixtures of the LoRA plugins."""

from support.plugin_fixtures import failures, plugins, trt

__all__ = ["failures", "plugins", "trt"]
