"""Error reporting, exit status and tables of the commands."""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trt_lora.plugins.errors import LoRAError
from trt_lora.scripts.terminal.printing.escapes import visible, visible_lines
from trt_lora.scripts.terminal.printing.rich_console import rich_console
from trt_lora.scripts.terminal.warnings_shown import warnings_shown

if TYPE_CHECKING:
    from rich.table import Table

FAILED = 2  # the exit status of every error that is not a defect of the package
INTERRUPTED = 130  # by Ctrl-C: what a shell says of a process that SIGINT ended
UNREAD = 141  # when nobody reads what is printed: what a shell says of a process that SIGPIPE ended


def warn(message: str) -> None:
    """Print a warning of one line on stderr."""
    _say(f"warning: {message}")


@warnings_shown(warn)
def run(command: Callable[[], None]) -> None:
    """Run a command; print an input's fault as one message and exit with FAILED.

    Ctrl-C makes it exit with INTERRUPTED. Where the reader of its output is gone, as in `| head`,
    it exits with UNREAD and says nothing.
    """
    if sys.stdout is None:
        _fail("standard output is closed; open it, or send it to a file or to /dev/null")
    _print_any_name()
    try:
        try:
            command()
        finally:
            print(end="", flush=True)
    except LoRAError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; no file was written", INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(UNREAD)
    except OSError as error:
        _fail(_what_went_wrong(error))


def _print_any_name() -> None:
    """Let file names that are no text be printed, as escapes; standard error does so itself."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Python would flush the closed pipe once more at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _what_went_wrong(error: OSError) -> str:
    place = f": {error.filename}" if error.filename else ""
    next_step = "make room" if error.errno == errno.ENOSPC else "check the path"
    return f"{error.strerror or error}{place}; {next_step}, and run it again"


def _fail(message: str, status: int = FAILED) -> None:
    _say(f"error: {message}")
    sys.exit(status)


def _say(text: str) -> None:
    """Print on stderr; where that is closed, nowhere: print would take stdout."""
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
