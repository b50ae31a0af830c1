"""Progress on standard error: bars on a terminal that has rich, else a line a stage."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trt_lora.builder.progress import Progress


class StageLines:
    """Progress for a pipe or a file: the name of every stage as it begins."""

    def stage(self, name: str) -> None:
        """Print it."""
        print(name, file=sys.stderr, flush=True)

    def advance(self, done: int, total: int) -> None:
        """Drop it."""

    def note(self, message: str) -> None:
        """Print it."""
        print(f"note: {message}", file=sys.stderr, flush=True)


@contextmanager
def stage_progress() -> Iterator[Progress]:
    """Show the stages of a command while the block runs; print its results behind the block."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield StageLines()
        return
    from trt_lora.scripts.terminal.build_progress import build_progress

    with build_progress() as bars:
        yield bars
