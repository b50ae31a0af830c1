"""The table of documented members: every member of ours and every test that it names exists."""

import argparse
import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.api_table.page import DOCUMENTS, PAGE, coming_from_page, coming_from_pages, page
from support.doc_blocks import ROOT

from trt_lora.scripts.commands import convert_adapter, merge
from trt_lora.scripts.terminal.build_options import build_parser

ROWS = [row for document in DOCUMENTS for row in document.rows]
MEMBERS = {  # of the documents, so that no row is lost
    "TensorRT-Edge-LLM `LoRAManager` (C++)": 26,
    "MAX `LoRAManager`": 18,
    "vLLM data structures": 63,
    "vLLM API": 28,
    "vLLM `LLM`": 8,
    "TensorRT-LLM LoRA workflow": 52,
    "PEFT `PeftModel` and `LoraConfig`": 21,
}


MAKE = "make it: PYTHONPATH=tests .venv/bin/python -m support.api_table.page"


def test_the_page_is_made_from_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), MAKE


@pytest.mark.parametrize("path", coming_from_pages(), ids=lambda path: path.stem)
def test_the_table_of_a_peer_is_made_from_the_rows(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == coming_from_page(path), MAKE


def test_every_member_of_the_documents_has_a_row() -> None:
    assert {document.title: len(document.rows) for document in DOCUMENTS} == MEMBERS
    for document in DOCUMENTS:
        names = [row.documented for row in document.rows]
        assert len(set(names)) == len(names)


def test_a_row_says_what_there_is_and_why_it_is_not_as_documented() -> None:
    for row in ROWS:
        assert row.ours, row
        assert row.test, row
        assert row.reason or row.state == "present", row
        assert "|" not in row.documented + row.reason, row


@pytest.mark.parametrize("ours", sorted({row.ours for row in ROWS}))
def test_what_is_ours_is_there(ours: str) -> None:
    command, _, option = ours.partition(" --")
    if command in PARSERS:
        assert not option or f"--{option}" in PARSERS[command]._option_string_actions
    else:
        resolve(ours)


@pytest.mark.parametrize("test", sorted({row.test for row in ROWS}))
def test_the_test_of_a_row_is_there(test: str) -> None:
    file, _, function = test.partition("::")
    assert function in functions(file)


def test_a_member_that_is_not_there_would_be_seen() -> None:
    for wrong in ("runtime.Scheduler.fly", "runtime.nowhere"):
        with pytest.raises(AttributeError):
            resolve(wrong)


@cache
def functions(file: str) -> frozenset[str]:
    """The functions of a file of tests."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def resolve(path: str) -> Any:
    """A module, class, field or method below trt_lora."""
    parts = path.split(".")
    found: Any = importlib.import_module("trt_lora." + parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and not isinstance(found, type):
            try:
                importlib.import_module(".".join(("trt_lora", *parts[:number])))
            except ModuleNotFoundError as error:
                raise AttributeError(path) from error
        found = getattr(found, part)
    return found


def _parser_of(add_options: Callable[[argparse.ArgumentParser], None]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser


PARSERS = {
    "build-engine": build_parser(),
    "trt-lora convert-adapter": _parser_of(convert_adapter.add_options),
    "trt-lora merge": _parser_of(merge.add_options),
}
