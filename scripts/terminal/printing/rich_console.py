"""rich's console, where standard output is a terminal and rich is installed."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


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
