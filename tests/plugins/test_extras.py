"""Optional dependencies: a missing one is named with its extra, and has no version."""

import numpy as np
import pytest

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.extras import extra, installed_versions


def test_a_package_that_is_not_installed_is_left_out() -> None:
    assert installed_versions(["numpy", "no-such-package"]) == {"numpy": np.__version__}


def test_a_missing_import_is_said_with_what_installs_it() -> None:
    said = r"^flying needs .*no_such_module.*; pip install 'trt-lora\[x\]'$"
    with pytest.raises(BackendError, match=said), extra("x", "flying"):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
