"""An interrupt at a chosen line, as Ctrl-C or a time limit come from a signal handler."""

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class InterruptedAnywhereError(BaseException):
    """No error that anything but the caller waits for."""


class InterruptAtLine:
    """A context in which one of the lines run by some folders of the product raises."""

    def __init__(self, at: int, *folders: str) -> None:
        """Raise at line `at` of those that are run, counted from 0.

        Args:
            at: the line; one that is never reached counts them alone.
            folders: of the product, such as "runtime/generation".
        """
        self._at, self._folders = at, folders
        self.seen = 0  # lines
        self.code = ""  # of the line that has raised

    def __enter__(self) -> Self:
        """Begin."""
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if "tests/" in name or not any(folder in name for folder in self._folders):
            return None
        if event == "line":
            self.seen += 1
            if self.seen > self._at:
                sys.settrace(None)
                self.code = linecache.getline(name, frame.f_lineno).strip()
                raise InterruptedAnywhereError
        return self._trace
