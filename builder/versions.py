"""Versions of the tools that export a model."""

import importlib.metadata

_TOOLS = ("trt-lora", "torch", "transformers", "onnx-ir", "onnxscript")


def tool_versions() -> dict[str, str]:
    """Return the versions of what exports a model, this package first."""
    return {tool: importlib.metadata.version(tool) for tool in _TOOLS}
