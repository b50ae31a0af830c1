"""Adapters closed to newer requests, so that a starving request gets their slot."""

from collections import abc
from dataclasses import dataclass

from trt_lora.runtime.generation.sequence import Sequence


@dataclass
class _Drain:
    waiting: int  # the id of the request that gets the slot
    since: int  # the step at which it began
    is_preempted: bool = False  # its rows were taken: nothing joins until the slot is another's


class DrainedAdapters:
    """One for each request that has waited too long for a slot, the first of them first.

    Who is drained stays so, whatever joins meanwhile: the wait is over when its answers are, or
    when its rows are preempted.
    """

    def __init__(self) -> None:
        """Nobody is drained."""
        self._drains: dict[str, _Drain] = {}  # by adapter

    def __len__(self) -> int:
        """How many are drained."""
        return len(self._drains)

    def admits(self, sequence: Sequence) -> bool:
        """Whether a request may join, as far as its adapter is concerned."""
        drain = self._drains.get(sequence.adapter) if sequence.adapter is not None else None
        return drain is None or (not drain.is_preempted and sequence.id < drain.waiting)

    def assign(
        self,
        waiting: abc.Sequence[Sequence],
        running: abc.Set[str],
        ends: abc.Callable[[], abc.Mapping[str, int]],
        step: int,
    ) -> None:
        """Drain as many adapters as requests wait, as far as there are others.

        Args:
            waiting: who waits longest comes first.
            running: the adapters of which requests run.
            ends: returns the step at which each of them ends; the first comes first.
            step: the number of this one.
        """
        kept = {n: d for n, d in self._drains.items() if n in running or d.is_preempted}
        names = list(kept)
        if len(names) < len(waiting):
            steps = ends()
            names += sorted(steps.keys() - names, key=lambda name: (steps[name], name))
        self._drains = {}
        for name, sequence in zip(names, waiting, strict=False):
            drain = self._drains[name] = kept.get(name, _Drain(sequence.id, step))
            drain.waiting = sequence.id

    def preempt(self, step: int, preempt_after: int) -> list[str]:
        """Return the adapters whose rows are to be taken now: they were drained for too long."""
        names = [
            name
            for name, drain in self._drains.items()
            if not drain.is_preempted and drain.since + preempt_after <= step
        ]
        for name in names:
            self._drains[name].is_preempted = True
        return names
