"""Lines of a conversation: edited where there is a terminal and readline, plain elsewhere."""

import io
import sys

import pytest
from support.commands import Terminal

from trt_lora.scripts.terminal.line_editor import LineEditor


def lines(text: str, monkeypatch: pytest.MonkeyPatch) -> LineEditor:
    """An editor whose standard input is a text, and no terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return LineEditor(lambda _: [])


def test_what_comes_from_a_pipe_is_read_line_by_line_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    editor = lines("first\n\nlast", monkeypatch)
    assert not editor.is_interactive
    assert [editor.read("> ") for _ in range(3)] == ["first", "", "last"]
    with pytest.raises(EOFError):
        editor.read("> ")
    assert capsys.readouterr().out == "> " * 4


def test_a_python_without_readline_reads_lines_as_they_are_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr(sys, "stdin", Terminal("first\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    editor = LineEditor(lambda _: [])
    assert editor.is_interactive
    assert editor.read("> ") == "first"
