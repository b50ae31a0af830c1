"""Progress callbacks of a build."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Receives the stages of a build; the command line draws them, a test records them."""

    def stage(self, name: str) -> None:
        """A stage begins; the one before it has ended."""

    def advance(self, done: int, total: int) -> None:
        """`done` of `total` steps of the stage are over; `total` may grow while it runs."""

    def note(self, message: str) -> None:
        """Something the user should know, such as an option that has no effect here."""


class NoProgress:
    """Progress for a caller who wants none."""

    def stage(self, name: str) -> None:
        """Drop it."""

    def advance(self, done: int, total: int) -> None:
        """Drop it."""

    def note(self, message: str) -> None:
        """Drop it."""
