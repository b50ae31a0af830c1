"""Movement of adapters between disk, host memory and slots."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Condition

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.managers.slots.cache.adapter_source import content_hash
from trt_lora.runtime.managers.slots.cache.cache_stats import CacheCounts, CacheStats
from trt_lora.runtime.managers.slots.cache.entry import (
    Entry,
    check_registered,
    check_unchanged,
)
from trt_lora.runtime.managers.slots.cache.host_store import HostStore
from trt_lora.runtime.managers.slots.cache.names import evicted
from trt_lora.runtime.managers.slots.cache.slot_table import SlotTable
from trt_lora.runtime.managers.slots.slot_stacks import SlotStacks


@dataclass(frozen=True)
class Naming:
    """How an entry that has come gets its name, if it has none; both are called under the lock."""

    replaced: Callable[[], Entry | None] = lambda: None  # who has the name
    publish: Callable[[], None] = lambda: None  # may refuse


NAMED = Naming()  # of an entry that has its name


class CacheLevels:
    """Host memory above slots: an adapter in a slot is in host memory too.

    Whoever moves an adapter marks it under `lock`, reads or copies without it, and publishes what
    came of it under it: nobody waits for a move but those who want that adapter, or its slot.
    """

    def __init__(
        self, stacks: SlotStacks, host_limit: int | None, forget: Callable[[Entry], None]
    ) -> None:
        """Take the slots, the limit of host memory in bytes, and what to do with the lost.

        Args:
            stacks: of the engine.
            host_limit: bytes; None is no limit.
            forget: called under `lock` for an entry that is evicted and cannot be read again.
        """
        self.lock = Condition()
        self._forget = forget
        self.stacks = stacks
        self.host = HostStore(host_limit)
        self.table = SlotTable(stacks.slots)
        self.held: dict[Entry, None] = {}  # the entries with `is_held`
        self.counts = CacheCounts()

    def hold(self, entry: Entry) -> None:
        """Count a lease; under `lock`.

        Raises:
            StateError: others hold all slots.
        """
        self.table.check_room(entry, self.held)
        entry.leases += 1
        self.held[entry] = None

    def unhold(self, entry: Entry) -> None:
        """Count a lease out; under `lock`."""
        entry.leases -= 1
        self.settle(entry)

    def pin(self, entry: Entry) -> None:
        """Keep an entry in its slot; under `lock`.

        Raises:
            StateError: others hold all slots.
        """
        self.table.check_room(entry, self.held)
        entry.is_pinned = True
        self.held[entry] = None

    def take_over_pin(self, entry: Entry, old: Entry) -> None:
        """Pin an entry that takes the name of one that is pinned, if it is; under `lock`.

        Raises:
            StateError: others hold all slots, sequences of the old one among them.
        """
        if old.is_pinned:
            self.table.check_room(entry, [e for e in self.held if e is not old or old.leases])
            entry.is_pinned = True
            self.held[entry] = None

    def unpin(self, entry: Entry) -> None:
        """Let an entry leave its slot; under `lock`."""
        entry.is_pinned = False
        self.settle(entry)

    def settle(self, entry: Entry) -> None:
        """Do what follows from a change of who holds or moves an entry; under `lock`."""
        if not entry.is_held:
            self.held.pop(entry, None)
        if not entry.is_named and entry.may_leave:
            self.drop(entry)
        self.lock.notify_all()

    def drop(self, entry: Entry) -> None:
        """Take an entry that nobody holds out of its slot and out of host memory; under `lock`."""
        if entry.in_slot is not None:
            self.stacks.clear(self.table.places.pop(entry))
            entry.in_slot = None
        if entry.on_host is not None:
            self.host.remove(entry)
            entry.on_host = None

    @contextmanager
    def moving(self, find: Callable[[], Entry]) -> Iterator[Entry]:
        """Keep an entry where it is, from the look on that finds it under `lock`."""
        with self.lock:
            entry = find()
            entry.moving += 1
        try:
            yield entry
        finally:
            with self.lock:
                self.stop_moving(entry)

    def stop_moving(self, entry: Entry) -> None:
        """Count a thread out that has moved an entry; under `lock`."""
        entry.moving -= 1
        self.settle(entry)

    def stats(self, registered: int) -> CacheStats:
        """Return what is where; under `lock`."""
        return CacheStats(
            registered=registered,
            on_host=len(self.host.entries),
            in_slots=len(self.table.places),
            slots=self.table.slots,
            leased=sum(entry.leases > 0 for entry in self.held),
            pinned=sum(entry.is_pinned for entry in self.held),
            host_bytes=self.host.used,
            host_limit=self.host.limit,
            slot_bytes=self.stacks.nbytes // self.table.slots,
            **asdict(self.counts),
        )

    def put(self, entry: Entry, fitted: Fitted, naming: Naming) -> None:
        """Keep an adapter whose weights are in memory already.

        Raises:
            StateError: it finds no room.
            AdapterError, StateError: the name cannot be had.
        """
        with self.lock:
            self._reserve(entry, naming)
            entry.on_host = Future()
            entry.on_host.set_result(fitted)
            try:
                self._arrive(entry, naming)
            except BaseException:
                self.host.remove(entry)
                entry.on_host = None
                raise

    def find(self, entries: Collection[Entry]) -> dict[Entry, int] | None:
        """Return the slots of adapters that are in use now, or None; under `lock`."""
        if not all(entry.in_slot is not None and entry.in_slot.done() for entry in entries):
            return None
        for entry in entries:
            self.table.touch(entry)
            self.host.touch(entry)
        self.counts.hits += len(entries)
        return {entry: self.table.places[entry] for entry in entries}

    def to_host(
        self, entry: Entry, adapter: Adapter | None = None, naming: Naming = NAMED
    ) -> Fitted:
        """Return an adapter in host memory, read from its source if it is not there.

        Args:
            entry: of the adapter; held, or kept by `moving`.
            adapter: what its source has opened just now, if it has.
            naming: gives the entry its name when it is there.

        Raises:
            AdapterError: its files are gone, damaged, or hold another adapter than they did.
            StateError: it finds no room.
            AdapterError, StateError: the name cannot be had.
        """
        with self.lock:
            future, is_mine = entry.on_host, entry.on_host is None
            if future is None:
                if entry.source is None:
                    raise evicted(entry.name)
                self._reserve(entry, naming)
                future = entry.on_host = Future()
            self.host.touch(entry)
        if is_mine:
            self._read(entry, adapter, future, naming)
        return future.result()

    def to_slot(self, entry: Entry) -> int:
        """Return the slot of an adapter; it is copied into one if it has none.

        Args:
            entry: of the adapter; held, or kept by `moving`.

        Raises:
            AdapterError: as `to_host`.
            StateError: it finds no room on the host, or others hold all slots.
        """
        fitted = self.to_host(entry)
        with self.lock:
            self.lock.wait_for(lambda: entry.in_slot is not None or self._take_slot(entry))
            is_mine = entry.in_slot is None
            future = entry.in_slot = entry.in_slot or Future()
            self.counts.hits += not is_mine
            self.counts.host_hits += is_mine
            self.table.touch(entry)
            slot = self.table.places[entry]
        if is_mine:
            self._copy(entry, slot, fitted, future)
        return future.result()

    def _reserve(self, entry: Entry, naming: Naming) -> None:
        """Make room on the host, as far as others can be read again."""
        self._evict(self.host.reserve(entry, naming.replaced()))

    def _arrive(self, entry: Entry, naming: Naming) -> None:
        """Give an entry that is there its name, and let go of who leaves for it, or do neither."""
        self.host.check_room(entry, naming.replaced())
        naming.publish()
        self._evict(self.host.shrink(entry))

    def _evict(self, victims: Iterable[Entry]) -> None:
        """Note who has left the host; they leave their slots, too."""
        for victim in victims:
            victim.on_host = None
            self.counts.evictions_from_host += 1
            if victim.source is None:
                self._forget(victim)
            if victim.in_slot is not None:
                self.counts.evictions_from_slots += 1
                victim.in_slot = None
                del self.table.places[victim]

    def _take_slot(self, entry: Entry) -> bool:
        """Give an entry a slot; False where others, which are being copied, may leave soon."""
        taken = self.table.take(entry)
        if taken is None:
            self.table.check_room(entry, self.held)
            return False
        if taken.leaving is not None:
            taken.leaving.in_slot = None
            self.counts.evictions_from_slots += 1
        return True

    def _read(
        self, entry: Entry, adapter: Adapter | None, future: Future[Fitted], naming: Naming
    ) -> None:
        assert entry.source is not None  # an entry without one is refused before
        try:
            check_registered(entry)
            fitted = entry.source.read(adapter or entry.source.open())
            digest = content_hash(fitted)
            check_unchanged(entry, fitted, digest)
            with self.lock:
                entry.content_hash = digest
                self._arrive(entry, naming)
                self.counts.disk_loads += 1
        except BaseException as error:
            with self.lock:
                self.host.remove(entry)
                entry.on_host = None
            future.set_exception(error)
            return
        future.set_result(fitted)

    def _copy(self, entry: Entry, slot: int, fitted: Fitted, future: Future[int]) -> None:
        start = time.perf_counter()
        try:
            self.stacks.place(slot, fitted)
        except BaseException as error:
            with self.lock:
                del self.table.places[entry]
                entry.in_slot = None
            future.set_exception(error)
            return
        with self.lock:
            self.counts.activation_seconds += time.perf_counter() - start
        future.set_result(slot)
