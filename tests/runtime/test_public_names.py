"""Public names of the runtime: each is found in its module, when it is wanted."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trt_lora.runtime as runtime


def declared() -> dict[str, str]:
    """The module of each name, as the imports for type checkers say."""
    tree = ast.parse(Path(str(runtime.__file__)).read_text(encoding="utf-8"))
    return {
        alias.name: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("trt_lora.")
        for alias in node.names
    }


def test_a_name_is_imported_from_where_type_checkers_look() -> None:
    assert sorted(declared()) == sorted(runtime.__all__) == dir(runtime)
    for name, module in declared().items():
        assert getattr(runtime, name) is getattr(sys.modules[module], name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        runtime.nothing  # noqa: B018


def test_the_package_imports_no_module_before_a_name_is_used() -> None:
    program = "import sys, trt_lora.runtime; print(*(m for m in sys.modules if 'trt_lora.' in m))"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["trt_lora.runtime"]
