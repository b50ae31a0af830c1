"""Adapters on their way to a slot: read and copied in the background, a slot held for them."""

from collections.abc import Collection
from concurrent.futures import Future
from enum import Enum

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore


class AdapterStage(Enum):
    """How far an adapter has come."""

    READY = "it lies where a step can bind it"
    COMING = "it will lie there, or be in memory, after a while"
    NO_SLOT = "others hold all slots"
    NO_MEMORY = "others hold the memory for adapters"


class AdapterLoads:
    """What was asked of the store for requests that wait.

    A slot that is free is reserved by a lease before the adapter is copied there, so that nobody
    takes it meanwhile; the first request that joins replaces it by its own.
    """

    def __init__(self, store: AdapterStore) -> None:
        """Nothing is on its way."""
        self._store = store
        self._loads: dict[str, Future[None]] = {}
        self._reserved: dict[str, Lease] = {}
        self._without_room: dict[str, StateError] = {}  # on the host, when last tried
        self._to_retry: set[str] = set()
        self._taken: Lease | None = None  # the last one, which its request may not have yet

    def have_ended(self) -> bool:
        """Whether `end` has something to say, or `give_up` has."""
        return bool(self._without_room) or any(load.done() for load in self._loads.values())

    @property
    def reserved(self) -> Collection[str]:
        """The adapters for which a slot is held."""
        return self._reserved.keys()

    @property
    def leases(self) -> list[Lease]:
        """Those of reserved slots, and the last one that was taken."""
        return [*self._reserved.values(), *([] if self._taken is None else [self._taken])]

    def advance(
        self, name: str, resident: Collection[str], *, read: bool, reserve: bool
    ) -> AdapterStage:
        """Bring an adapter one step nearer, without waiting.

        Args:
            name: of the adapter.
            resident: those that a step can bind at once.
            read: begin to read it if it is on disk alone.
            reserve: hold a slot for it if one is free, and begin to copy it there.

        Raises:
            UnknownAdapterError: there is no such adapter.
        """
        on_its_way = AdapterStage.NO_MEMORY if name in self._without_room else AdapterStage.COMING
        if name in self._loads:
            return on_its_way
        self._drop_replaced(name)
        if self._store.can_lease(name):
            return self._place(name, resident, reserve=reserve)
        if self._store.info(name).is_loaded:
            return AdapterStage.NO_SLOT
        if read and (name not in self._without_room or name in self._to_retry):
            self._to_retry.discard(name)
            self._loads[name] = self._store.prefetch(name)
        return on_its_way

    def end(self) -> tuple[list[str], dict[str, BaseException]]:
        """Forget the loads that are done; return whose they were, and why some failed.

        Who found no room on the host is not among those: it is tried again after `make_room`.
        """
        failed: dict[str, BaseException] = {}
        ended = [(name, load) for name, load in self._loads.items() if load.done()]
        for name, load in ended:
            del self._loads[name]
            self._without_room.pop(name, None)
            error = None if load.cancelled() else load.exception()
            if isinstance(error, StateError):
                self._without_room[name] = error
            elif error is not None:
                failed[name] = error
        return [name for name, _ in ended], failed

    def make_room(self) -> None:
        """Try again what found no room on the host: an adapter is not held any more."""
        self._to_retry = set(self._without_room)

    def give_up(self) -> dict[str, BaseException]:
        """Return why the host has no room for adapters, if nobody will make any."""
        tried = self._without_room.keys() - self._to_retry - self._loads.keys()
        return {name: self._without_room.pop(name) for name in tried}

    def take(self, name: str, version: int | None) -> Lease | None:
        """Return a lease for a request; the slot is not held any more.

        Args:
            name: of an adapter that is ready.
            version: that it must have, if any.

        Returns:
            None if another thread has taken the slot.

        Raises:
            StateError: the name means another version.
            UnknownAdapterError, AdapterError: another thread has unloaded it, or lost its files.
        """
        try:
            self._taken = lease = self._store.lease(name, expected_version=version)
        except StateError:
            if version not in (None, self._store.info(name).version):
                raise
            return None
        self._drop(name)
        return lease

    def forget(self, name: str) -> None:
        """Give back the slot that is held for an adapter: nobody waits for it any more."""
        self._without_room.pop(name, None)
        self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self._reserved:
            self._store.release(self._reserved.pop(name))

    def _place(self, name: str, resident: Collection[str], *, reserve: bool) -> AdapterStage:
        if name in resident:
            return AdapterStage.READY
        if not reserve:
            return AdapterStage.COMING
        if name not in self._reserved:
            try:
                self._reserved[name] = self._store.lease(name)
            except StateError:  # another thread was faster
                return AdapterStage.NO_SLOT
        self._loads[name] = self._store.prefetch(name)
        return AdapterStage.COMING

    def _drop_replaced(self, name: str) -> None:
        """Give back a slot that is held for what the name does not mean any more."""
        reserved = self._reserved.get(name)
        if reserved is not None and reserved.version != self._store.info(name).version:
            self._drop(name)
