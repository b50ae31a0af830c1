"""Versions of installed packages."""

import numpy as np

from trt_lora.builder.versions import installed_versions, tool_versions


def test_a_package_that_is_not_installed_is_left_out() -> None:
    assert installed_versions(["numpy", "no-such-package"]) == {"numpy": np.__version__}


def test_the_tools_that_export_begin_with_this_package() -> None:
    assert next(iter(tool_versions())) == "trt-lora"
