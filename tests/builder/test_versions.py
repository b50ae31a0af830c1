"""Versions of what exports a model."""

from trt_lora.builder.versions import tool_versions


def test_the_tools_that_export_begin_with_this_package() -> None:
    assert next(iter(tool_versions())) == "trt-lora"
