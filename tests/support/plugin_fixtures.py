"""TensorRT-RTX's real bindings with the LoRA plugins, and what their callbacks note."""

from collections.abc import Iterator
from typing import Any

import pytest

from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.plugins.tensorrt.plugin_registry import LoraPlugins, register_plugins


@pytest.fixture
def trt() -> Any:
    """The module of the bindings."""
    return TENSORRT_RTX.load()


@pytest.fixture
def plugins(trt: Any) -> LoraPlugins:
    """The plugins, registered."""
    return register_plugins(trt)


@pytest.fixture
def failures(plugins: LoraPlugins) -> Iterator[list[str]]:
    """What callbacks note that a test calls."""
    with plugins.failures.collected() as noted:
        yield noted
