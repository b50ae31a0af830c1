"""Tables and labelled lines: plain in a pipe, drawn by rich on a terminal that has it."""

import sys

import pytest
from support.commands import Terminal

from trt_lora.scripts.terminal.console import print_table
from trt_lora.scripts.terminal.printing import print_facts, print_json


def print_both() -> None:
    print_table(["file", "bytes"], [["a", "10"], ["[bold]b", "7"]])
    print_facts([("GPU 0", "none"), ("x", "word " * 30)])


def test_in_a_pipe_lines_are_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_both()
    assert capsys.readouterr().out.splitlines() == [
        "file     bytes",
        "a           10",
        "[bold]b      7",
        "GPU 0  none",
        "x      " + "word " * 30,
    ]


def printed_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of 80 columns gets, which takes colours."""
    terminal = Terminal()
    with monkeypatch.context() as patch:  # pytest replaces standard output when a test begins
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "80")
        patch.delenv("NO_COLOR", raising=False)
        patch.setattr(sys, "stdout", terminal)
        print_both()
    return terminal.getvalue()


def test_on_a_terminal_they_are_drawn_and_wrapped_and_no_value_is_markup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = printed_on_a_terminal(monkeypatch)
    assert "─" in printed
    assert "\x1b[1m" in printed
    assert "[bold]b" in printed
    assert max(map(len, printed.splitlines())) < 130  # 80 columns, and colours


def test_on_a_terminal_without_rich_they_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert printed_on_a_terminal(monkeypatch).startswith("file     bytes\na           10\n")


def test_what_would_change_the_terminal_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a\x1b[2J"], [["b\n"], ["caf\udce9 é"]])
    print_facts([("\x07", "")])
    assert capsys.readouterr().out == "a\\x1b[2J\nb\\n\ncaf\\udce9 é\n\\x07  \n"


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), float("inf"), 1.5]}, indent=None)
    assert capsys.readouterr().out == '{"a": [null, null, 1.5]}\n'
