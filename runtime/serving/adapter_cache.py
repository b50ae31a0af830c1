"""Protocols of the adapters in two levels, as the scheduling of requests sees them."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar, runtime_checkable


class AdapterLease(Protocol):
    """A promise that one generation of an adapter stays loaded; see `Lease`."""

    @property
    def generation(self) -> int:
        """The generation that the name meant when it was leased."""
        ...


LeaseT = TypeVar("LeaseT", bound=AdapterLease)


@runtime_checkable
class AdapterCache(Protocol[LeaseT]):
    """Named adapters on disk, on the host, and some of them in slots; see `SlotAdapters`."""

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of every adapter that has one."""
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

    def lease(self, name: str, *, expected_generation: int | None = None) -> LeaseT:
        """Keep an adapter, and in its slot once it has one, until `release`.

        Raises:
            UnknownAdapterError: there is no such adapter.
            StateError: no slot can be had, or the adapter is of another generation.
        """
        ...

    def release(self, lease: LeaseT) -> None:
        """Give a lease back."""
        ...

    def check_integrity(self) -> None:
        """Raise StateError where bytes, slots or leases do not add up."""
        ...
