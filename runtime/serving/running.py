"""Requests that have a row."""

from collections.abc import Iterator
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
    """By number."""

    def __init__(self) -> None:
        """Nobody runs."""
        self._by_id: dict[int, Running[LeaseT]] = {}

    def __len__(self) -> int:
        """How many run."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[int]:
        """Their numbers."""
        return iter(self._by_id)

    def add(self, running: Running[LeaseT]) -> None:
        """Take a request."""
        self._by_id[running.request.id] = running

    def stop(self, request_id: int) -> Running[LeaseT]:
        """Let a request go.

        Raises:
            StateError: it does not run.
        """
        running = self._by_id.pop(request_id, None)
        if running is None:
            raise StateError(f"request {request_id} does not run; those are {list(self._by_id)}")
        return running

    def adapters(self) -> set[str | None]:
        """Return whose requests run."""
        return {running.request.adapter for running in self._by_id.values()}

    def last_steps(self) -> dict[str, int]:
        """Return when the last answer of each adapter ends."""
        last: dict[str, int] = {}
        for running in self._by_id.values():
            name = running.request.adapter
            if name is not None:
                last[name] = max(last.get(name, 0), running.last_step)
        return last

    def check_integrity(self) -> None:
        """Raise StateError if a request has another adapter than its lease says."""
        for number, running in self._by_id.items():
            if (running.lease is None) != (running.request.adapter is None):
                raise StateError(
                    f"request {number} is {running.request}, its lease {running.lease}"
                )
