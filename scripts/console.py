"""What the commands share: one way to report an error, and plain tables."""

import sys
from collections.abc import Callable, Sequence

from trt_lora.plugins.errors import LoRAError
from trt_lora.scripts.warnings_shown import warnings_shown

FAILED = 2  # the exit status of every error that is not a defect of the package


def warn(message: str) -> None:
    """Print a warning of one line on stderr."""
    print(f"warning: {message}", file=sys.stderr)


@warnings_shown(warn)
def run(command: Callable[[], None]) -> None:
    """Run a command; print an input's fault as one message and exit with FAILED."""
    try:
        command()
    except LoRAError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written")
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{place}; make room or check the path, and run it again")


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(FAILED)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first flush left, the others flush right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
