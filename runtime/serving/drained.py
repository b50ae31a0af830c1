"""Adapters that are drained: no younger request of them joins, until their slots are free."""

from collections.abc import Set as AbstractSet


class DrainedAdapters:
    """One for each adapter that has waited too long for a slot, the longest first.

    Who is drained stays so, whatever joins meanwhile: the wait is over when its answers are.
    """

    def __init__(self) -> None:
        """Nobody is drained."""
        self._places: dict[str, int] = {}  # from 0, in order

    def __len__(self) -> int:
        """How many are drained."""
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Whether an adapter is drained."""
        return name in self._places

    def is_among(self, name: str | None, count: int) -> bool:
        """Whether an adapter is drained for one of the first `count` that wait."""
        return name is not None and self._places.get(name, count) < count

    def retain(self, running: AbstractSet[str]) -> None:
        """Let those go that do not run any more."""
        if not self._places.keys() <= running:
            self._number([name for name in self._places if name in running])

    def add(self, name: str) -> None:
        """Drain one more."""
        self._places[name] = len(self._places)

    def shorten(self, count: int) -> None:
        """Drain no more than `count`: others that waited have left."""
        if count < len(self._places):
            self._number(list(self._places)[:count])

    def _number(self, names: list[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
