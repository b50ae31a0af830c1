"""Labelled lines: a fact each, in two columns."""

from collections.abc import Iterable

from trt_lora.scripts.terminal.printing.escapes import visible
from trt_lora.scripts.terminal.printing.rich_console import rich_console

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
