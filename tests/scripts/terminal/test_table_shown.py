"""Tables: plain in a pipe, by rich on a terminal, and names as they stand in both."""

import io

import pytest

from trt_lora.scripts.terminal import table_shown
from trt_lora.scripts.terminal.table_shown import show_table

ROWS = [("[red]", "1.5"), ("b", "20.0")]
PLAIN = "name     ms\n[red]   1.5\nb      20.0\n"


class Terminal(io.StringIO):
    """Somebody looks at it."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> str:
    monkeypatch.setattr("sys.stdout", out)
    show_table(("name", "ms"), ROWS)
    return out.getvalue()


def test_a_pipe_gets_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == PLAIN


def test_a_terminal_gets_lines_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = shown(monkeypatch, Terminal())
    assert "┃" in printed
    assert "[red]" in printed


def test_a_terminal_without_rich_gets_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_shown, "find_spec", lambda _: None)
    assert shown(monkeypatch, Terminal()) == PLAIN
