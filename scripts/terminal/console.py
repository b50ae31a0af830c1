"""Error reporting, exit status and tables of the commands."""

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from trt_lora.plugins.errors import LoRAError
from trt_lora.scripts.entry_points import INTERRUPTED as INTERRUPTED
from trt_lora.scripts.terminal.interrupts import TERMINATED as TERMINATED
from trt_lora.scripts.terminal.interrupts import (
    NotedInterrupt,
    Terminated,
    noted_interrupts,
    sigterm_raises,
)
from trt_lora.scripts.terminal.printing import print_error, rich_console, visible, visible_lines

if TYPE_CHECKING:
    from rich.table import Table


FAILED = 2  # the exit status of every error that is not a defect of the package
BROKEN_PIPE = 141  # where the reader is gone: what a shell says of a process that SIGPIPE ended


def warn(message: str) -> None:
    """Print a warning of one line on stderr."""
    say(f"warning: {message}")


def note(message: str) -> None:
    """Print on stderr what a person should know of a command that does what it is told."""
    say(f"note: {message}")


class _Failure(NamedTuple):
    """Why a command ends, for a person and for a program."""  # a dataclass takes 9 ms to import

    kind: str  # the class of the error
    message: str
    hints: tuple[str, ...] = ()  # lines behind it that a program has no use for
    status: int = FAILED

    def show(self, *, as_json: bool) -> None:
        """Print it on stderr, and perhaps as an object of one line on stdout."""
        say("\n".join([f"error: {self.message}", *self.hints]))
        if as_json:
            print_error(self.kind, self.message)


class _Shown(logging.Handler):
    """Hands every message to a function, as one line, each once."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._show = show
        self._known: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().splitlines())
        if line not in self._known:
            self._known.add(line)
            self._show(line)


@contextmanager
def warnings_shown(show: Callable[[str], object]) -> Iterator[None]:
    """Hand the warnings of the log `trt_lora` to `show` while the block runs, each as one line."""
    handler, log = _Shown(show), logging.getLogger("trt_lora")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@warnings_shown(warn)
def run(command: Callable[[], None], words: Sequence[str] | None = None) -> None:
    """Run a command; print an input's fault as one message and exit with FAILED.

    Ctrl-C makes it exit with INTERRUPTED, SIGTERM with TERMINATED. Where the reader of its output
    is gone, as in `| head`, it exits with BROKEN_PIPE and says nothing.

    Args:
        command: what it does.
        words: of the command line, by default this process's own; with `--json` among them, the
            fault is an object on standard output, too.
    """
    if sys.stdout is None:
        say("error: standard output is closed; open it, or send it to a file or to /dev/null")
        sys.exit(FAILED)
    _print_any_name()
    options = takewhile(lambda word: word != "--", sys.argv[1:] if words is None else words)
    try:
        with noted_interrupts() as interrupted:
            _run(command, interrupted, as_json="--json" in options)
    except BrokenPipeError:
        _drop_output()
        sys.exit(BROKEN_PIPE)


def _run(command: Callable[[], None], interrupted: NotedInterrupt, *, as_json: bool) -> None:
    try:
        try:
            with sigterm_raises():
                command()
        finally:
            print(end="", flush=True)
    except (KeyboardInterrupt, Terminated, Exception) as error:
        if (failure := _failure_of(error, interrupted)) is None:
            raise
        failure.show(as_json=as_json)
        sys.exit(failure.status)


def _failure_of(error: BaseException, interrupted: NotedInterrupt) -> _Failure | None:
    """None of what is no fault of the input."""
    if isinstance(error, Terminated):
        return _Failure(Terminated.__name__, "terminated by SIGTERM", status=TERMINATED)
    notes = tuple(getattr(error, "__notes__", ()))
    if interrupted or isinstance(error, KeyboardInterrupt):
        message = "; ".join(["interrupted", *notes])
        return _Failure(KeyboardInterrupt.__name__, message, status=INTERRUPTED)
    if isinstance(error, LoRAError):
        return _Failure(type(error).__name__, str(error), notes)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return _Failure(type(error).__name__, _os_error_text(error))
    return None


def _print_any_name() -> None:
    """Let file names that are no text be printed, as escapes; standard error does so itself."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Python would flush the closed pipe once more at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _os_error_text(error: OSError) -> str:
    place = f": {error.filename}" if error.filename else ""
    next_step = "make room" if error.errno == errno.ENOSPC else "check the path"
    return f"{error.strerror or error}{place}; {next_step}, and run it again"


def say(text: str) -> None:
    """Print a text on stderr, escaped; where that is closed, nowhere: print would take stdout."""
    if sys.stderr is not None:
        print(visible_lines(text), file=sys.stderr)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first flush left, the others flush right; ruled on a terminal."""
    lines = [[visible(cell) for cell in line] for line in (header, *rows)]
    if console := rich_console():
        console.print(_rich_table(lines[0], lines[1:]))
        return
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def _rich_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for place, name in enumerate(header):
        table.add_column(Text(name), justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
