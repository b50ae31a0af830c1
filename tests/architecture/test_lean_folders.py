"""The tests of the lean runtime import nothing that a deployment has not installed."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from architecture.sources import ROOT, files

# What `make test-lean` runs, and what it does not install.
LEAN = ("runtime/**/*", "plugins/contract/**/*", "plugins/test_*", "transcripts/**/*")
ABSENT = {
    *("torch", "transformers", "accelerate", "peft", "gguf", "polygraphy", "rich"),
    *("onnx", "onnx_ir", "onnxscript", "tensorrt", "tensorrt_rtx", "cuda"),
    *("trt_lora.builder", "trt_lora.scripts.bench", "trt_lora.scripts.demo"),
}


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
    """What a test file needs that is not installed, through other files of the tests, too."""
    found: set[str] = set()
    for name in imported(path):
        ours = (ROOT / "tests" / name.replace(".", "/")).with_suffix(".py")
        found |= (
            absent(ours)
            if ours.is_file()
            else {a for a in ABSENT if f"{name}.".startswith(f"{a}.")}
        )
    return frozenset(found)


def test_the_lean_tests_need_no_torch_and_no_builder() -> None:
    paths = files("tests/conftest.py", *(f"tests/{pattern}.py" for pattern in LEAN))
    assert len(paths) > 50
    found = {path.as_posix(): sorted(absent(ROOT / path)) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_make_runs_the_lean_folders() -> None:
    (line,) = (
        line for line in (ROOT / "Makefile").read_text().splitlines() if "LEAN_TESTS :=" in line
    )
    for pattern in LEAN:
        assert pattern.partition("/*")[0] in line
