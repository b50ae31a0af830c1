"""Versions of installed packages."""

import importlib.metadata
from collections.abc import Iterable
from contextlib import suppress

_TOOLS = ("trt-lora", "torch", "transformers", "onnx-ir", "onnxscript")


def tool_versions() -> dict[str, str]:
    """Return the versions of what exports a model, this package first."""
    return installed_versions(_TOOLS)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
