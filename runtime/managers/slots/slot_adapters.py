"""SlotAdapters: named adapters of an engine for many, in its slots, in host memory or on disk."""

import threading
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self
from weakref import WeakSet

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import StateError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.slots.cache.cache_stats import CacheStats
from trt_lora.runtime.managers.slots.cache.catalog import AdapterCatalog
from trt_lora.runtime.managers.slots.cache.entry import Entry, Lease
from trt_lora.runtime.managers.slots.cache.integrity import check_integrity
from trt_lora.runtime.managers.slots.cache_config import CacheConfig, bytes_of, slots_within
from trt_lora.runtime.managers.slots.slot_stacks import SlotStacks
from trt_lora.runtime.managers.slots.step_bindings import StepBindings
from trt_lora.runtime.memory.host import free_host_memory
from trt_lora.runtime.memory.tensor import TensorMap

AdapterOfRow = Lease | str | None  # None is the base model


class SlotAdapters(AdapterCatalog):
    """A cache of two levels above the disk: adapters in host memory, some of them in slots.

    What is used stays: where memory or a slot is wanted, the adapter that was used least recently
    leaves, unless somebody has a lease of it or has pinned it. One that was loaded from disk is
    read again when it is wanted again, and must be the same then.

    A name means one *generation* of an adapter at a time. Loading with `replace` makes a new one;
    those who have a lease of the old one keep it, and its memory is free when the last lets go.

    Threads: every method may be called from any thread. Files are read and adapters copied into
    slots without holding up a thread that wants other adapters. A step reads slots as long as it
    runs: whoever runs steps while other threads load takes a lease of each adapter in them, or
    lets a `Scheduler` do so.
    """

    @checked
    def __init__(self, executor: Executor, config: CacheConfig | None = None) -> None:
        """Allocate the engine's stacks.

        Raises:
            ConfigError: the engine takes one adapter at a time, or a limit has room for no slot.
            BackendError: the device is out of memory.
        """
        config = config or CacheConfig()
        slots = slots_within(config, executor.manifest, executor.memory)
        stacks = SlotStacks(executor.manifest, executor.memory, slots)
        host_limit = bytes_of(config.host_memory, free_host_memory)
        super().__init__(executor.manifest, stacks, host_limit)
        self._bindings = StepBindings(stacks, executor.memory.device)
        self._leases: dict[Lease, None] = {}
        self._background: ThreadPoolExecutor | None = None
        self._prefetched: dict[Entry, Future[None]] = {}
        self._watchers: WeakSet[threading.Event] = WeakSet()

    def __repr__(self) -> str:
        """Return how many adapters it knows, and how many of them have a slot."""
        known, in_slots = len(self._names.entries), len(self._levels.table.places)
        return f"<SlotAdapters: {known} adapters, {in_slots} in slots>"

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Drop what waits to be prefetched, and end the thread that does it."""
        with self._lock:
            background, self._background = self._background, None
        if background is not None:
            background.shutdown(cancel_futures=True)

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of every adapter that has one."""
        with self._lock:
            places = self._levels.table.places.items()
            return {entry.name: slot for entry, slot in places if entry.is_named}

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        return self.stacks.slots

    @property
    def pinned(self) -> AbstractSet[str]:
        """The adapters that are pinned."""
        with self._lock:
            entries = self._names.entries.values()
            return {entry.name for entry in entries if entry.is_pinned}

    @property
    def stats(self) -> CacheStats:
        """What is where, and what has happened."""
        with self._lock:
            return self._levels.stats(registered=len(self._names.entries))

    @checked
    def lease(self, name: str, *, expected_generation: int | None = None) -> Lease:
        """Keep an adapter loaded, and in its slot once it has one, until `release`.

        It is read from disk if it is only there; `prefetch` does that in the background.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: the name means another generation, others hold all slots, or host memory
                has no room.
            AdapterError: its files are needed, and are gone, damaged or changed.
        """
        with self._lock:
            lease = self._leased(self._names.get(name, expected_generation))
        try:
            self._levels.to_host(lease.entry)
        except BaseException:
            self.release(lease)
            raise
        return lease

    @checked
    def release(self, lease: Lease) -> None:
        """Give back a lease.

        Raises:
            StateError: it was given back already.
        """
        with self._lock:
            if lease not in self._leases:
                raise StateError(f"the lease of adapter {lease.name!r} was released already")
            del self._leases[lease]
            self._levels.unhold(lease.entry)
        self._notify()

    @checked
    def can_lease(self, name: str) -> bool:
        """Whether a lease finds the adapter on the host, and room for it in the slots.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            entry, held = self._names.get(name), self._levels.held
            return entry.is_read and (entry in held or len(held) < self.stacks.slots)

    @checked
    def is_on_host(self, name: str) -> bool:
        """Whether an adapter is in host memory.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            return self._names.get(name).is_read

    @checked
    def pin(self, name: str, *, allow_last: bool = False) -> None:
        """Keep an adapter in a slot until `unpin` or `unload`.

        Args:
            name: of the adapter.
            allow_last: take the last slot that is not pinned, too: no other adapter can be used.

        Raises:
            UnknownAdapterError, AdapterError: as `lease`.
            StateError: as `lease`; or it is the last slot.
        """
        with self._lock:
            entry = self._names.get(name)
            others = self.pinned - {name}
            if not allow_last and len(others) + 1 >= self.slot_count:
                raise StateError(
                    f"adapter {name!r} would be pinned in the last of {self.slot_count} slots, and "
                    f"no other adapter could be used; pinned are {sorted(others)}; unpin one, or "
                    "pass allow_last=True"
                )
            self._levels.pin(entry)
        try:
            self._levels.to_slot(entry)
        except BaseException:
            with self._lock:
                self._levels.unpin(entry)
            raise

    @checked
    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            self._levels.unpin(self._names.get(name))
        self._notify()

    @checked
    def prefetch(self, name: str) -> Future[None]:
        """Bring an adapter to the host in the background, and into a slot that nobody holds.

        Returns:
            What is done when it is there; it holds the error if it cannot be read or finds no room
            on the host. That all slots are held is none.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            entry = self._names.get(name)
            if entry in self._prefetched:
                return self._prefetched[entry]
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="trt-lora-prefetch")
            future = self._prefetched[entry] = self._background.submit(self._prefetch, entry)
            entry.moving += 1  # until the future ends, so that it is not evicted before its turn
        future.add_done_callback(lambda _: self._end_prefetch(entry))
        return future

    @checked
    def watch(self, event: threading.Event) -> None:
        """Set an event whenever an adapter has come or was let go of, as long as it lives."""
        with self._lock:
            self._watchers.add(event)

    @checked
    def unload(self, name: str, *, expected_generation: int | None = None) -> None:
        """Forget a name; see `AdapterCatalog.unload`."""
        super().unload(name, expected_generation=expected_generation)
        self._notify()

    @checked
    def activate(self, adapter: Lease | str) -> int:
        """Return the slot of an adapter; it is copied into one if it has none.

        Raises:
            UnknownAdapterError, StateError, AdapterError: as `lease`.
        """
        with self._levels.moving(lambda: self._entry_of(adapter)) as entry:
            return self._levels.to_slot(entry)

    @checked
    def rows(self, adapters: Sequence[AdapterOfRow], *, all_slots: bool = False) -> TensorMap:
        """Return the LoRA inputs of a step: the stacks, and the slot of each row.

        On the host the stacks begin and end with the slots that the rows take.

        Args:
            adapters: of each row; None is the base model.
            all_slots: bind every slot on the host too, at the cost of all of them. From rank 32 on
                the bits of a row with an adapter may depend on how many are bound; then they depend
                on nothing that the other rows take.

        Returns:
            The same object as before for the same rows; nobody may write to it.

        Raises:
            UnknownAdapterError, AdapterError: as `lease`.
            StateError: the rows take more adapters than there are slots, or others hold them.
        """
        with self._lock:
            of_rows = [None if a is None else self._entry_of(a) for a in adapters]
            wanted = dict.fromkeys(entry for entry in of_rows if entry is not None)
            slots = self._levels.find(wanted)
            leases = [] if slots is not None else self._all_leased(wanted)
        if slots is None:
            slots = self._placed(leases)
        places = [None if entry is None else slots[entry] for entry in of_rows]
        with self._lock:
            return self._bindings.of(places, all_slots=all_slots)

    def check_integrity(self) -> None:
        """Check that bytes, slots and leases add up, whatever other threads are about.

        Raises:
            StateError: they do not.
        """
        with self._lock:
            check_integrity(self._levels, self._names.entries, self._leases)

    def _notify(self) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for event in watchers:
            event.set()

    def _entry_of(self, adapter: Lease | str) -> Entry:
        if not isinstance(adapter, Lease):
            return self._names.get(adapter)
        if adapter not in self._leases:
            raise StateError(f"the lease of adapter {adapter.name!r} was released")
        return adapter.entry

    def _leased(self, entry: Entry) -> Lease:
        """A lease of an entry; under the lock."""
        self._levels.hold(entry)
        lease = Lease(entry)
        self._leases[lease] = None
        return lease

    def _all_leased(self, entries: Collection[Entry]) -> list[Lease]:
        """Leases of all adapters of a step, or none; under the lock."""
        if len(entries) > self.stacks.slots:
            raise StateError(
                f"{len(entries)} adapters in one step are more than this engine's "
                f"{self.stacks.slots} slots; split the rows, or build with a larger --max-loras"
            )
        leases: list[Lease] = []
        try:
            leases.extend(map(self._leased, entries))
        except BaseException:
            for lease in leases:
                self.release(lease)
            raise
        return leases

    def _placed(self, leases: Sequence[Lease]) -> dict[Entry, int]:
        """Bring leased adapters into slots, and give the leases back."""
        try:
            return {lease.entry: self._levels.to_slot(lease.entry) for lease in leases}
        finally:
            for lease in leases:
                self.release(lease)

    def _prefetch(self, entry: Entry) -> None:
        self._levels.to_host(entry)
        with suppress(StateError):  # all slots are held
            self._levels.to_slot(entry)

    def _end_prefetch(self, entry: Entry) -> None:
        with self._lock:
            self._prefetched.pop(entry, None)
            self._levels.stop_moving(entry)
        self._notify()
