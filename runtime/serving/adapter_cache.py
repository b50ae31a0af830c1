"""Protocol of the adapters in two levels, as the scheduling of requests sees them."""

import threading
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from trt_lora.runtime.store.entry import Lease


@runtime_checkable
class AdapterCache(Protocol):
    """Named adapters on disk, on the host, and some of them in slots; see `AdapterStore`."""

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of every adapter that has one."""
        ...

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        ...

    @property
    def pinned(self) -> AbstractSet[str]:
        """The adapters that are pinned in slots."""
        ...

    def generation(self, name: str) -> int:
        """Return the number of what is loaded under a name; another one after it is replaced.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        ...

    def is_on_host(self, name: str) -> bool:
        """Whether a lease needs no disk.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        ...

    def can_lease(self, name: str) -> bool:
        """Whether a lease would find a slot, and needs no disk.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        ...

    def prefetch(self, name: str) -> Future[None]:
        """Bring an adapter to the host, and into a slot that nobody holds, in the background.

        Returns:
            What is done when it is there. It holds a StateError if the host has no room now, and
            another error if the adapter cannot be read.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        ...

    def lease(self, name: str, *, expected_version: int | None = None) -> Lease:
        """Keep an adapter, and in its slot once it has one, until `release`.

        Raises:
            UnknownAdapterError: there is no such adapter.
            StateError: no slot can be had, or the adapter is of another generation.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Give a lease back."""
        ...

    def watch(self, event: threading.Event) -> None:
        """Set an event whenever an adapter has come or was let go of, as long as it lives."""
        ...

    def check_integrity(self) -> None:
        """Raise StateError where bytes, slots or leases do not add up."""
        ...
