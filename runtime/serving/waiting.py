"""Requests that wait: one queue an adapter, the oldest first."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.serving.request import Request

_ID = attrgetter("id")


class WaitingRequests:
    """Queues by adapter, and their heads in order, so that a step looks at few requests."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._by_id: dict[int, Request] = {}
        self._queues: dict[str | None, list[Request]] = {}
        self._heads: list[Request] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request waits."""
        return request_id in self._by_id

    def get(self, request_id: int) -> Request | None:
        """Return a request if it waits."""
        return self._by_id.get(request_id)

    @property
    def heads(self) -> Sequence[Request]:
        """The oldest request of each adapter, the oldest of them first; the list in use."""
        return self._heads

    def head(self, adapter: str | None) -> Request | None:
        """Return the oldest request of an adapter."""
        queue = self._queues.get(adapter)
        return queue[0] if queue else None

    def of(self, adapter: str | None) -> tuple[Request, ...]:
        """Return all requests of an adapter, the oldest first."""
        return tuple(self._queues.get(adapter, ()))

    def add(self, request: Request) -> None:
        """Take a request to its place by age, which is at the front where it comes back."""
        queue = self._queues.setdefault(request.adapter, [])
        insort(queue, request, key=_ID)
        if queue[0] is request:
            if len(queue) > 1:
                self._drop_head(queue[1])
            insort(self._heads, request, key=_ID)
        self._by_id[request.id] = request

    def remove(self, request: Request) -> None:
        """Let a request go."""
        del self._by_id[request.id]
        queue = self._queues[request.adapter]
        place = bisect_left(queue, request.id, key=_ID)
        del queue[place]
        if place:
            return
        self._drop_head(request)
        if queue:
            insort(self._heads, queue[0], key=_ID)
        else:
            del self._queues[request.adapter]

    def check_integrity(self) -> None:
        """Raise StateError if queues, heads and numbers differ, or are not in order."""
        queues = list(self._queues.values())
        queued = [request.id for queue in queues for request in queue]
        heads = [request.id for request in self._heads]
        in_order = all([r.id for r in queue] == sorted(r.id for r in queue) for queue in queues)
        if (
            not in_order
            or sorted(queued) != sorted(self._by_id)
            or heads != sorted(queue[0].id for queue in queues if queue)
            or len(heads) != len(queues)
        ):
            raise StateError(f"queues of {queued} with heads {heads} for {sorted(self._by_id)}")

    def _drop_head(self, request: Request) -> None:
        del self._heads[bisect_left(self._heads, request.id, key=_ID)]
