"""Progress of a command: plain lines where nobody watches, bars on a terminal, both on stderr."""

import io
import sys

import pytest

from trt_lora.builder.progress import Progress
from trt_lora.scripts.terminal.stage_progress import stage_progress


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


def work(progress: Progress) -> None:
    """Two stages, one of them in steps."""
    progress.stage("[load]")
    progress.note("it is [small]")
    progress.stage("compare")
    for done in range(5):
        progress.advance(done, 4)
    print("a result")


def test_in_a_pipe_every_stage_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with stage_progress() as progress:
        work(progress)
    printed = capsys.readouterr()
    assert printed.err == "[load]\nnote: it is [small]\ncompare\n"
    assert printed.out == "a result\n"


def drawn(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal gets."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stage_progress() as progress:
        work(progress)
    return terminal.getvalue()


def test_on_a_terminal_stages_are_bars_and_results_stay_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="bars are drawn by rich")
    found = drawn(monkeypatch)
    assert "━" in found
    for text in ("[load]", "note: it is [small]", "compare"):
        assert text in found
    assert capsys.readouterr().out == "a result\n"


def test_a_terminal_without_rich_has_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert drawn(monkeypatch) == "[load]\nnote: it is [small]\ncompare\n"
    assert capsys.readouterr().out == "a result\n"
