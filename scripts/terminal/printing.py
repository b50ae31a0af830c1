"""Results on standard output: text that is safe, sizes, facts and JSON."""

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def visible(text: str) -> str:
    """Return a text with escapes for what would move the cursor, change colours or is no text."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    """Return the same of a text of several lines."""
    return "\n".join(map(visible, text.split("\n")))


def byte_size(nbytes: int) -> str:
    """Return a size in the largest unit that it has one of, with a digit behind the point."""
    size, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB"):
        if round(size, 1) < 1000:
            break
        size, unit = size / 1000, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def rich_console() -> "Console | None":
    """Return a console on standard output; None in a pipe, where lines are plain, or without rich.

    It is imported for a terminal only: that takes a tenth of a second.
    """
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False, markup=False)


Fact = tuple[str, str]  # label, text


def print_facts(facts: Iterable[Fact]) -> None:
    """Print labels flush left and what they say behind them; on a terminal, wrapped there."""
    lines = [(visible(label), visible(fact)) for label, fact in facts]
    if console := rich_console():
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for label, fact in lines:
            grid.add_row(Text(label, "bold"), Text(fact))
        console.print(grid)
        return
    width = max((len(label) for label, _ in lines), default=0)
    for label, fact in lines:
        print(f"{label:<{width}}  {fact}")


def print_json(value: object, *, indent: int | None = 1) -> None:
    """Print a value as JSON; NaN and infinities, which JSON lacks, are null.

    Args:
        value: of dictionaries, lists, texts and numbers.
        indent: spaces a level; None prints one line.
    """
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=indent), flush=True)


def print_error(kind: str, message: str) -> None:
    """Print why a command, or a line of a conversation, failed: an object on one line.

    Args:
        kind: the class of the error.
        message: what is said on standard error.
    """
    print_json({"error": {"type": kind, "message": message}}, indent=None)
