"""Requests that wait: one queue for each client and adapter, in the order of arrival."""

from bisect import bisect_left, insort
from collections import abc
from operator import attrgetter

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.generation.sequence import Sequence

_ID = attrgetter("id")
_Queue = tuple[abc.Hashable, str | None]  # client and adapter


class WaitingSequences:
    """Queues by client and adapter, so that a step looks at few requests."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._by_id: dict[int, Sequence] = {}
        self._queues: dict[_Queue, list[Sequence]] = {}
        self._counts: dict[str | None, int] = {}  # how many wait, by adapter

    def __len__(self) -> int:
        """How many wait."""
        return len(self._by_id)

    def __contains__(self, sequence: object) -> bool:
        """Whether a request waits."""
        return isinstance(sequence, Sequence) and self._by_id.get(sequence.id) is sequence

    @property
    def clients(self) -> set[abc.Hashable]:
        """Those whose requests wait."""
        return {client for client, _ in self._queues}

    def heads(self, service: abc.Mapping[abc.Hashable, float]) -> list[Sequence]:
        """Return the oldest request of each client and adapter, in the order of their turns.

        Args:
            service: what each client has received; who has least comes first, then who is oldest.
        """
        first = [queue[0] for queue in self._queues.values()]
        return sorted(first, key=lambda s: (service.get(s.client, 0), s.id))

    def wants(self, adapter: str | None) -> bool:
        """Whether a request of an adapter waits."""
        return adapter in self._counts

    def of(self, adapter: str | None) -> list[Sequence]:
        """Return all requests of an adapter."""
        return [s for (_, name), queue in self._queues.items() if name == adapter for s in queue]

    def add(self, sequence: Sequence) -> None:
        """Take a request to its place by age, which is at the front where it comes back."""
        queue = self._queues.setdefault((sequence.client, sequence.adapter), [])
        insort(queue, sequence, key=_ID)
        self._by_id[sequence.id] = sequence
        self._counts[sequence.adapter] = self._counts.get(sequence.adapter, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        """Let a request go."""
        del self._by_id[sequence.id]
        key = sequence.client, sequence.adapter
        queue = self._queues[key]
        del queue[bisect_left(queue, sequence.id, key=_ID)]
        if not queue:
            del self._queues[key]
        self._counts[sequence.adapter] -= 1
        if not self._counts[sequence.adapter]:
            del self._counts[sequence.adapter]

    def check_integrity(self) -> None:
        """Raise StateError if queues and numbers differ, or are not in order."""
        queues = list(self._queues.values())
        queued = [sequence.id for queue in queues for sequence in queue]
        in_order = all([s.id for s in queue] == sorted(s.id for s in queue) for queue in queues)
        counted = sum(self._counts.values())
        if not in_order or sorted(queued) != sorted(self._by_id) or counted != len(queued):
            raise StateError(f"queues of {queued} for {sorted(self._by_id)}, {counted} counted")
