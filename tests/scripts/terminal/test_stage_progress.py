"""Progress of a command: plain lines where nobody watches, bars on a terminal, both on stderr."""

import sys

import pytest
from support.commands import Terminal

from trt_lora.scripts.terminal.stage_progress import TurnProgress, stage_progress


def work(progress: TurnProgress) -> None:
    """Three stages, one of them in steps and one in turns."""
    progress.stage("[load]")
    progress.note("it is [small]")
    progress.stage("compare")
    for done in range(5):
        progress.advance(done, 4)
    progress.stage("measure")
    for done in range(2):
        progress.turn(f"round {done} of 2: [pirate]", done, 2)
    print("a result")


LINES = """\
[load]
note: it is [small]
compare
measure
round 0 of 2: [pirate]
round 1 of 2: [pirate]
"""


def test_in_a_pipe_every_stage_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with stage_progress() as progress:
        work(progress)
    printed = capsys.readouterr()
    assert printed.err == LINES
    assert printed.out == "a result\n"


def test_where_stderr_is_closed_progress_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with stage_progress() as progress:
        work(progress)
    assert capsys.readouterr().out == "a result\n"


def drawn(monkeypatch: pytest.MonkeyPatch, term: str = "xterm") -> str:
    """What a terminal gets."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", term)
    with stage_progress() as progress:
        work(progress)
    return terminal.getvalue()


def test_on_a_terminal_stages_are_bars_and_results_stay_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="bars are drawn by rich")
    found = drawn(monkeypatch)
    assert "━" in found
    for text in ("[load]", "note: it is [small]", "compare", "round 1 of 2: [pirate]"):
        assert text in found
    assert capsys.readouterr().out == "a result\n"


def test_a_terminal_without_rich_has_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert drawn(monkeypatch) == LINES
    assert capsys.readouterr().out == "a result\n"


def test_a_terminal_that_cannot_move_its_cursor_has_plain_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert drawn(monkeypatch, "dumb") == LINES
