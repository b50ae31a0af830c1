"""Adapters that are drained: no younger request of them joins, until their slots are free."""

from collections.abc import Collection, Mapping, Sequence


class DrainedAdapters:
    """One for each adapter that has waited too long for a slot, the longest first.

    Who is drained stays so, whatever joins meanwhile: the wait is over when its answers are.
    """

    def __init__(self) -> None:
        """Nobody is drained."""
        self._names: list[str] = []

    def __contains__(self, name: object) -> bool:
        """Whether an adapter is drained."""
        return name in self._names

    def first(self, count: int) -> Sequence[str]:
        """Return those drained for the first `count` that wait."""
        return self._names[:count]

    def forget_ended(self, running: Collection[str]) -> None:
        """Let those go that do not run any more."""
        self._names = [name for name in self._names if name in running]

    def extend(self, count: int, last_steps: Mapping[str, int]) -> bool:
        """Drain adapters until there are `count`; return whether there are.

        Args:
            count: how many.
            last_steps: when each of those that run ends; the next one is the one that ends first.
        """
        free = {name: step for name, step in last_steps.items() if name not in self._names}
        more = sorted(free, key=free.__getitem__)[: max(count - len(self._names), 0)]
        self._names += more
        return len(self._names) >= count

    def shorten(self, count: int) -> None:
        """Drain no more than `count`: others that waited have left."""
        del self._names[count:]
