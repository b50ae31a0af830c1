"""The tests of the lean runtime import nothing that a deployment has not installed."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from architecture.sources import ROOT, files
from conftest import LEAN, NEEDS_TORCH, pytest_ignore_collect

# What `make test-lean` runs, less the files that are marked, and what it does not install.
LEAN_TESTS = ("runtime/**/*", "plugins/contract/**/*", "plugins/test_*", "transcripts/**/*")
BUILD_TIME = {
    *("torch", "transformers", "accelerate", "peft", "gguf", "polygraphy", "rich"),
    *("onnx", "onnx_ir", "onnxscript"),
    *("trt_lora.builder", "trt_lora.scripts.bench", "trt_lora.scripts.demo"),
}
ABSENT = BUILD_TIME | {"tensorrt", "tensorrt_rtx", "cuda"}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports at its top, not those that a function imports."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def absent(path: Path) -> frozenset[str]:
    """What a file needs that is not installed, through other files of the checkout, too."""
    found: set[str] = set()
    for name in imported(path):
        found |= {a for a in ABSENT if f"{name}.".startswith(f"{a}.")}
        for place in (ROOT / "tests", ROOT / "src"):
            ours = (place / name.replace(".", "/")).with_suffix(".py")
            found |= absent(ours) if ours.is_file() else set()
    return frozenset(found)


def is_marked(path: Path) -> bool:
    return NEEDS_TORCH in (ROOT / path).read_text()


def test_the_lean_tests_need_no_torch_and_no_builder() -> None:
    paths = files("tests/conftest.py", *(f"tests/{pattern}.py" for pattern in LEAN_TESTS))
    lean = [path for path in paths if path.name == "conftest.py" or not is_marked(path)]
    assert len(lean) > 50
    found = {path.as_posix(): sorted(absent(ROOT / path)) for path in lean}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_marked_file_needs_what_is_there_only_where_engines_are_built() -> None:
    marked = [path for path in files("tests/*/**/test_*.py") if is_marked(path)]
    assert len(marked) > 20
    assert [path for path in marked if not absent(ROOT / path) & BUILD_TIME] == []


@pytest.mark.parametrize(
    ("expression", "is_left_out"),
    [(LEAN, True), (f"{LEAN} and not slow", True), ("", False), ("needs_torch", False)],
)
def test_a_marked_file_is_not_even_imported(
    tmp_path: Path, expression: str, is_left_out: bool
) -> None:
    marked, lean = tmp_path / "test_marked.py", tmp_path / "test_lean.py"
    marked.write_text(f"import of_no_package\npytestmark = {NEEDS_TORCH}\n")
    lean.write_text("def test_it(): pass\n")
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    assert bool(pytest_ignore_collect(marked, config)) == is_left_out
    assert not pytest_ignore_collect(lean, config)
    assert not pytest_ignore_collect(tmp_path, config)


def test_make_runs_the_lean_folders_without_the_marked_files() -> None:
    make = (ROOT / "Makefile").read_text()
    (line,) = (line for line in make.splitlines() if "LEAN_TESTS :=" in line)
    for pattern in LEAN_TESTS:
        assert pattern.partition("/*")[0] in line
    assert f'-m "{LEAN}"' in make
