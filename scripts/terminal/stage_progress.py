"""Progress on standard error: bars on a terminal that has rich, else a line a stage or turn."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from trt_lora.scripts.terminal.console import note, say


class TurnProgress(Protocol):
    """`Progress` of a build, and turns: parts of a stage that take seconds and have names."""

    def stage(self, name: str) -> None:
        """As in `Progress`."""

    def advance(self, done: int, total: int) -> None:
        """As in `Progress`."""

    def note(self, message: str) -> None:
        """As in `Progress`."""

    def turn(self, name: str, done: int, total: int) -> None:
        """A turn of the stage begins; `done` of `total` are over."""


class StageLines:
    """Progress for a pipe, a file or a terminal without rich: what begins, by its name."""

    def stage(self, name: str) -> None:
        """Print it."""
        say(name)

    def advance(self, done: int, total: int) -> None:
        """Drop it."""

    def note(self, message: str) -> None:
        """Print it."""
        note(message)

    def turn(self, name: str, done: int, total: int) -> None:
        """Print its name."""
        say(name)


@contextmanager
def stage_progress() -> Iterator[TurnProgress]:
    """Show the stages of a command while the block runs; print its results behind the block."""
    if not _draws() or importlib.util.find_spec("rich") is None:
        yield StageLines()
        return
    from trt_lora.scripts.terminal.build_progress import build_progress

    with build_progress() as bars:
        yield bars


def _draws() -> bool:
    """Whether stderr is a terminal in which a bar can move; rich shows nothing in others."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal and os.environ.get("TERM") not in ("dumb", "unknown")
