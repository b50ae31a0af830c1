"""Requests that have a row."""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.serving.adapter_cache import LeaseT
from trt_lora.runtime.serving.request import Request


@dataclass(frozen=True)
class Running(Generic[LeaseT]):
    """A request that has a row."""

    request: Request
    lease: LeaseT | None  # of its adapter, which belongs to the row; None: the base model
    last_step: int  # at which its answer ends, steps of its prompt left out


class RunningRequests(Generic[LeaseT]):
    """By number, and how many of each adapter."""

    def __init__(self) -> None:
        """Nobody runs."""
        self._by_id: dict[int, Running[LeaseT]] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        """How many run."""
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request runs."""
        return request_id in self._by_id

    def __iter__(self) -> Iterator[int]:
        """Their numbers."""
        return iter(self._by_id)

    @property
    def adapters(self) -> AbstractSet[str]:
        """Those of which requests run."""
        return self._counts.keys()

    @property
    def leases(self) -> list[LeaseT]:
        """Of all that have one."""
        return [r.lease for r in self._by_id.values() if r.lease is not None]

    def add(self, running: Running[LeaseT]) -> None:
        """Take a request."""
        self._by_id[running.request.id] = running
        name = running.request.adapter
        if name is not None:
            self._counts[name] = self._counts.get(name, 0) + 1

    def stop(self, request_id: int) -> Running[LeaseT]:
        """Let a request go.

        Raises:
            StateError: it does not run.
        """
        running = self._by_id.pop(request_id, None)
        if running is None:
            raise StateError(f"request {request_id} does not run; those are {list(self._by_id)}")
        name = running.request.adapter
        if name is not None:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
        return running

    def ends(self) -> dict[str, int]:
        """Return the step at which the last answer of each adapter ends."""
        last: dict[str, int] = {}
        for running in self._by_id.values():
            name = running.request.adapter
            if name is not None:
                last[name] = max(last.get(name, 0), running.last_step)
        return last

    def check_integrity(self) -> None:
        """Raise StateError if a request has no lease, or adapters are counted wrongly."""
        names = Counter(r.request.adapter for r in self._by_id.values())
        bare = [
            n for n, r in self._by_id.items() if (r.lease is None) != (r.request.adapter is None)
        ]
        del names[None]
        if names != self._counts or bare:
            raise StateError(f"{self._counts} run, counted {dict(names)}; without a lease: {bare}")
