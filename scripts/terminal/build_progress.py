"""Progress bars of a build."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from trt_lora.scripts.terminal.printing import visible


class BuildProgress:
    """Draws a build: one line per stage, with a bar where the number of steps is known."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def stage(self, name: str) -> None:
        """End the line of the last stage and begin another."""
        self.finish()
        self._task = self._bars.add_task(name, total=None, turn="")

    def advance(self, done: int, total: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total)

    def turn(self, name: str, done: int, total: int) -> None:
        """Move the bar, and show the turn's name behind it until the next one's."""
        if self._task is not None:
            shown = visible(name)
            self._bars.update(self._task, completed=done, total=total, turn=shown, refresh=True)

    def note(self, message: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(f"note: {message}", highlight=False, markup=False)

    def finish(self) -> None:
        """End the line of the last stage."""
        if self._task is not None:
            self._bars.update(self._task, completed=1, total=1, turn="")
            self._bars.stop_task(self._task)
            self._task = None


@contextmanager
def build_progress() -> Iterator[BuildProgress]:
    """Show a build's progress on standard error while the block runs."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<10}", markup=False),
        BarColumn(30),
        TimeElapsedColumn(),
        TextColumn("{task.fields[turn]}", markup=False),
    )
    # What is printed on standard output stays there, for what reads it.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as bars:
        progress = BuildProgress(bars)
        yield progress
        progress.finish()
