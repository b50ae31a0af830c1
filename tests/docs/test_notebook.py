"""The notebook in git has no outputs; `make notebook` runs it, and so does the continuous run."""

import ast
import json

from support.doc_blocks import ROOT

NOTEBOOK = "docs/switching.ipynb"


def test_the_notebook_holds_sources_alone_in_the_order_of_the_text() -> None:
    notebook = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert codes
    assert [cell["outputs"] for cell in codes] == [[]] * len(codes)
    assert {cell["execution_count"] for cell in codes} == {None}
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    text = "\n".join("".join(cell["source"]) for cell in codes)
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text)))


def test_the_continuous_run_runs_it() -> None:
    assert "make notebook\n" in (ROOT / ".ci" / "run").read_text()
    assert f"papermill --no-progress-bar {NOTEBOOK}" in (ROOT / "Makefile").read_text()
