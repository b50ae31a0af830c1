"""Adapters that are drained: no younger request of them joins, until their slots are free."""

from collections.abc import Collection, Mapping, Sequence


class DrainedAdapters:
    """One for each adapter that has waited too long for a slot, the longest first.

    Who is drained stays so, whatever joins meanwhile: the wait is over when its answers are.
    """

    def __init__(self) -> None:
        """Nobody is drained."""
        self._names: list[str] = []

    def __len__(self) -> int:
        """How many are drained."""
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        """Whether an adapter is drained."""
        return name in self._names

    def first(self, count: int) -> Sequence[str]:
        """Return those drained for the first `count` that wait."""
        return self._names[:count]

    def forget_ended(self, running: Collection[str | None]) -> None:
        """Let those go that do not run any more."""
        self._names = [name for name in self._names if name in running]

    def extend(self, count: int, last_steps: Mapping[str, int]) -> None:
        """Drain adapters until there are `count`, as far as others run.

        Args:
            count: how many.
            last_steps: when the last answer of each that runs ends; who ends first comes first.
        """
        others = [name for name in last_steps if name not in self._names]
        others.sort(key=last_steps.__getitem__)
        self._names += others[: count - len(self._names)]

    def shorten(self, count: int) -> None:
        """Drain no more than `count`: others that waited have left."""
        del self._names[count:]
