"""A budget of code lines for each top folder: what is added has to be worth what it adds."""

import ast
from pathlib import Path

import pytest
from support.doc_blocks import ROOT

BUDGET = {"plugins": 3460, "runtime": 21_140, "builder": 9100, "scripts": 10_030}
TESTS = 65_290


def code_lines(path: Path) -> int:
    """Lines that are no blanks, comments or docstrings; of CUDA those that are no // comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix != ".py":
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in lines)
    docstrings = {
        number
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if ast.get_docstring(node, clean=False) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(lines, 1)
    )


@pytest.mark.parametrize("folder", BUDGET)
def test_a_folder_keeps_its_budget_and_has_no_slack_for_a_subsystem(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cu", ".cuh")]
    lines = sum(map(code_lines, files))
    assert lines <= BUDGET[folder], "make it smaller, or raise the number and say why in CHANGELOG"
    assert lines > BUDGET[folder] - 200, "lower the number: what was saved is not to be spent again"


def test_the_tests_keep_theirs() -> None:
    assert sum(map(code_lines, (ROOT / "tests").rglob("*.py"))) <= TESTS


def test_blanks_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""Two\nlines."""\n\nimport os  # 1\n\n# no\nX = """\ntext\n"""  # 2 to 4\n')
    assert code_lines(path) == 4
    cuda = tmp_path / "a.cu"
    cuda.write_text("// no\n\nint x;  // yes\n")
    assert code_lines(cuda) == 1
