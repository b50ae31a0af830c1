"""Adapters that are drained: nothing joins of them but what is older than who waits for a slot."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from trt_lora.runtime.serving.request import Request


class DrainedAdapters:
    """One for each request that has waited too long for a slot, the oldest first.

    Who is drained stays so, whatever joins meanwhile: the wait is over when its answers are.
    """

    def __init__(self) -> None:
        """Nobody is drained."""
        self._waiting: dict[str, int] = {}  # the number of the request that waits, by adapter

    def __len__(self) -> int:
        """How many are drained."""
        return len(self._waiting)

    def admits(self, request: Request) -> bool:
        """Whether a request may join, as far as its adapter is concerned."""
        if request.adapter is None:
            return True
        return request.id < self._waiting.get(request.adapter, request.id + 1)

    def assign(
        self,
        waiting: Sequence[Request],
        running: AbstractSet[str],
        ends: Callable[[], Mapping[str, int]],
    ) -> None:
        """Drain as many adapters as requests wait, as far as there are others.

        Args:
            waiting: the oldest first.
            running: the adapters of which requests run.
            ends: returns the step at which each of them ends; the first comes first.
        """
        names = [name for name in self._waiting if name in running]
        if len(names) < len(waiting):
            steps = ends()
            names += sorted(steps.keys() - names, key=lambda name: (steps[name], name))
        self._waiting = {name: r.id for name, r in zip(names, waiting, strict=False)}
