"""Outbox: what a replica says to one ingress, a step's messages at a time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
_IDLE_S = 1.0  # without requests, until nobody listens any more
_UNHEARD_S = 2.0  # until somebody else is asked to listen


class Outbox(Generic[ItemT]):
    """Gathers messages, which a stream takes away while there are requests."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.requests = 0  # that may have something to say
        self._waiting: list[ItemT] = []
        self._has_some = asyncio.Event()
        self._is_heard, self._asked_at = False, asyncio.get_running_loop().time()

    @property
    def is_lost(self) -> bool:
        """Whether nobody listens who was asked to."""
        age = asyncio.get_running_loop().time() - self._asked_at
        return not self._is_heard and age > _UNHEARD_S

    def put(self, item: ItemT) -> None:
        """Let a message leave with the next batch."""
        self._waiting.append(item)
        self._has_some.set()

    async def batches(self) -> AsyncIterator[list[ItemT]]:
        """Yield what there is, whole steps, until there have been no requests for a second."""
        self._is_heard = True
        while await self._has_more():
            count = 0
            while count < len(self._waiting):  # the other rows of the step write theirs meanwhile
                count = len(self._waiting)
                await asyncio.sleep(0)
            self._has_some.clear()
            batch, self._waiting = self._waiting, []
            yield batch

    async def _has_more(self) -> bool:
        while not self._has_some.is_set():
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self._has_some.wait()
            except TimeoutError:
                if not self.requests and not self._has_some.is_set():  # it may come just then
                    return False
        return True
