"""Versions of what exports a model."""

from trt_lora.plugins.extras import installed_versions

_TOOLS = ("trt-lora", "torch", "transformers", "onnx-ir", "onnxscript")


def tool_versions() -> dict[str, str]:
    """Return the versions of what exports a model, this package first."""
    return installed_versions(_TOOLS)
