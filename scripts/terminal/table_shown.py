"""Tables for people: by rich on a terminal, where it is installed, and plain in a pipe."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from trt_lora.scripts.terminal.console import print_table


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first flush left, the others flush right."""
    if sys.stdout.isatty() and find_spec("rich"):
        _show(header, rows)
    else:
        print_table(header, rows)


def _show(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # as it stands: a name in brackets is no style
    Console().print(table)
