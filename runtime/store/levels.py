"""Movement of adapters between disk, memory and slots."""

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from threading import Condition, Event
from weakref import WeakSet

from trt_lora.plugins.errors import LoRAError, StateError
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.memory.host import Stream
from trt_lora.runtime.store.buffer_level import BufferLevel
from trt_lora.runtime.store.entry import Entry, Lease, Loaded, check_unchanged
from trt_lora.runtime.store.memory_level import MemoryLevel
from trt_lora.runtime.store.names import Names, evicted
from trt_lora.runtime.store.slot_level import SlotLevel
from trt_lora.runtime.store.stats import StoreCounts, StoreStats


class Levels:
    """Memory above slots, where the engine has them: what lies in a slot is in memory too.

    A thread that moves an adapter marks it under `lock`, reads or copies without it, and publishes
    what came of it under it: a move holds up those alone that want that adapter, or its slot.
    """

    def __init__(self, device: SlotLevel | BufferLevel, memory: MemoryLevel, names: Names) -> None:
        """Take the levels, and names, all of them empty."""
        self.lock = Condition()
        self.device, self.memory, self.names = device, memory, names
        self.slots = device if isinstance(device, SlotLevel) else None
        self.held: dict[Entry, None] = {}  # the entries with `is_held`
        self.leases: dict[Lease, None] = {}  # that were given and not given back
        self.counts = StoreCounts()
        self.watchers: WeakSet[Event] = WeakSet()

    def notify(self) -> None:
        """Set the events of those that watch."""
        if not self.watchers:
            return
        with self.lock:
            watchers = list(self.watchers)
        for event in watchers:
            event.set()

    def retire(self, entry: Entry, why: LoRAError | None = None) -> None:
        """Take its name from an entry, and theirs from all that is made of it; under `lock`."""
        self.let_go(self.names.remove(entry, why))

    def unload(self, entry: Entry, wait_s: float) -> int:
        """Retire an entry; return how many bytes of memory that made free within some seconds.

        Under `lock`, which others can have meanwhile.
        """
        nbytes = 0 if entry.in_memory is None else entry.nbytes
        self.retire(entry)
        self.notify()
        return nbytes if self.lock.wait_for(lambda: entry.in_memory is None, wait_s) else 0

    def let_go(self, entries: Iterable[Entry]) -> None:
        """Drop what has lost its name and is not leased; its pin ends with it; under `lock`."""
        for entry in entries:
            entry.is_pinned = False
            self.after_change(entry)

    def publish(self, entry: Entry) -> None:
        """Let its name mean an entry from now on, unless it was taken meanwhile; under `lock`.

        Raises:
            AdapterError, StateError: the name cannot be had, or parts have lost theirs.
        """
        if entry.claim is None:
            return
        self.names.check_new(entry.name, entry.claim)
        if gone := [part.name for part in entry.parts if not part.is_named]:
            raise StateError(f"blend {entry.name!r}: {gone} were unloaded or replaced meanwhile")
        old = self._replaced(entry)
        if old is not None and old.is_pinned:  # its pin is the new one's
            self.pin(entry, [e for e in self.held if e is not old or old.leases])
        entry.claim = None
        self.let_go(self.names.set(entry))

    def lease(self, entry: Entry, held: Collection[Entry] | None = None) -> Lease:
        """Return a new lease of an entry; under `lock`.

        Raises:
            StateError: others hold all slots; `held` says which, where that is about to change.
        """
        self._check_slots(entry, self.held if held is None else held)
        entry.leases += 1
        self.held[entry] = None
        lease = Lease(entry)
        self.leases[lease] = None
        return lease

    def lease_all(self, entries: Iterable[Entry]) -> list[Lease]:
        """Return leases of all entries, or raise and hold none; under `lock`."""
        leases: list[Lease] = []
        try:
            leases.extend(map(self.lease, entries))
        except BaseException:
            for lease in leases:
                self.release(lease)
            raise
        return leases

    def release(self, lease: Lease) -> None:
        """Take a lease back; under `lock`.

        Raises:
            StateError: it was given back already.
        """
        self.check_lease(lease)
        del self.leases[lease]
        lease.entry.leases -= 1
        self.after_change(lease.entry)
        if (strength := self.names.idle_strength()) is not None:
            self.retire(strength)

    def exchange(self, lease: Lease | None, entry: Entry) -> Lease:
        """Take a lease back and return one of an entry, or raise and change neither; under `lock`.

        Raises:
            StateError: it was given back already, or others hold all slots.
        """
        self.memory.touch(entry)
        if lease is None:
            return self.lease(entry)
        self.check_lease(lease)
        before, held = lease.entry, self.held
        if self.slots is not None and before.leases == 1 and not before.is_pinned:
            held = dict.fromkeys(other for other in held if other is not before)
        found = self.lease(entry, held)
        self.release(lease)
        self.notify()
        return found

    def check_lease(self, lease: Lease) -> None:
        """Raise StateError if a lease was given back; under `lock`."""
        if lease not in self.leases:
            raise StateError(f"the lease of adapter {lease.name!r} was released already")

    def pin(self, entry: Entry, held: Collection[Entry] | None = None) -> None:
        """Keep an entry in its slot, or in memory; under `lock`.

        Raises:
            StateError: others hold all slots; `held` says which, where that is about to change.
        """
        self._check_slots(entry, self.held if held is None else held)
        entry.is_pinned = True
        self.held[entry] = None

    def can_hold(self, entry: Entry, held: Collection[Entry]) -> bool:
        """Whether an entry can be held beside others, as far as there are slots; under `lock`."""
        return self.slots is None or entry in held or len(held) < self.slots.count

    def _check_slots(self, entry: Entry, held: Collection[Entry]) -> None:
        if not self.can_hold(entry, held):
            holders = ", ".join(other.describe() for other in held)
            raise StateError(
                f"adapter {entry.name!r} finds all {len(held)} slots in use by {holders}; wait "
                "for a sequence to end, unpin an adapter, or build with a larger --max-loras"
            )

    def unpin(self, entry: Entry) -> None:
        """Let an entry leave; under `lock`."""
        entry.is_pinned = False
        self.after_change(entry)

    def after_change(self, entry: Entry) -> None:
        """Do what follows from a change of what holds or moves an entry; under `lock`."""
        if not entry.is_held:
            self.held.pop(entry, None)
        if not entry.is_named and entry.is_evictable:
            self.drop(entry)
        self.lock.notify_all()

    def drop(self, entry: Entry) -> None:
        """Take an entry that is not held out of its slot and out of memory; under `lock`."""
        if entry.in_memory is not None:
            self.device.clear(entry)
            self.memory.remove(entry)
            entry.leave_memory()

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
        self.after_change(entry)

    @contextmanager
    def kept_in_memory(self, entry: Entry) -> Iterator[Loaded]:
        """Keep an adapter in memory; read it before, if it is not there.

        Raises:
            AdapterError, StateError: as `to_memory`.
        """
        with self.moving(lambda: entry):
            yield self.to_memory(entry)

    def stats(self) -> StoreStats:
        """Return what is where; under `lock`."""
        slots = self.slots
        return StoreStats(
            registered=len(self.names.entries),
            in_memory=len(self.memory.entries),
            in_slots=0 if slots is None else len(slots.places),
            slots=0 if slots is None else slots.count,
            leased=sum(entry.leases > 0 for entry in self.held),
            pinned=sum(entry.is_pinned for entry in self.held),
            memory_bytes=self.memory.used,
            memory_limit=self.memory.limit,
            slot_bytes=0 if slots is None else slots.stacks.nbytes // slots.count,
            **asdict(self.counts),
        )

    def find(self, entries: Collection[Entry]) -> bool:
        """Whether adapters that are in use now can be bound at once; under `lock`."""
        if not all(map(self.is_resident, entries)):
            return False
        for entry in entries:
            self.touch(entry)
        self.counts.hits += len(entries)
        return True

    def touch(self, entry: Entry) -> None:
        """Make an entry the last one used, wherever it is; under `lock`."""
        if entry.in_memory is not None:
            self.memory.touch(entry)
        if entry.in_slot is not None and self.slots is not None:
            self.slots.touch(entry)

    def is_resident(self, entry: Entry) -> bool:
        """Whether a step can bind an adapter at once; under `lock`."""
        if self.slots is None:
            return entry.is_loaded
        return entry.in_slot is not None and entry.in_slot.done()

    def loaded(self, entry: Entry, fitted: Fitted, stream: Stream = None) -> Loaded:
        """Return what was read of an adapter as the engine takes it.

        Raises:
            AdapterError: it is another adapter than it was.
            BackendError: the device is out of memory.
        """
        assert entry.source is not None  # what came in memory is not read
        digest = entry.source.content_hash(fitted)
        check_unchanged(entry, fitted, digest)
        loaded = self.device.load(fitted, stream)
        with self.lock:
            entry.content_hash = digest
        return loaded

    def to_memory(self, entry: Entry, load: Callable[[], Loaded] | None = None) -> Loaded:
        """Return an adapter in memory, read from its source if it is not there.

        Args:
            entry: of the adapter; held, or kept by `moving`. It gets its name when it is there, if
                it claims one.
            load: what brings it there, if not its source; see `loaded`.

        Raises:
            AdapterError: its files are gone, damaged, or hold another adapter than they did.
            StateError: it finds no room.
            AdapterError, StateError: the name cannot be had.
        """
        with self.lock:
            future, is_mine = entry.in_memory, entry.in_memory is None
            if future is None:
                if entry.source is None and load is None:
                    raise evicted(entry.name)
                self._evict(self.memory.reserve(entry, self._replaced(entry)))
                future = entry.in_memory = Future()
            self.memory.touch(entry)
        if is_mine:
            self._load(entry, load or partial(self._read, entry), future)
        return future.result()

    def to_device(self, entry: Entry) -> int | None:
        """Bring an adapter to where a step can bind it: into a slot, where there are some.

        Args:
            entry: of the adapter; held, or kept by `moving`.

        Returns:
            The slot; None without slots.

        Raises:
            AdapterError: as `to_memory`.
            StateError: it finds no room in memory, or others hold all slots.
        """
        loaded, slots = self.to_memory(entry), self.slots
        if slots is None:
            return None
        with self.lock:
            self.lock.wait_for(lambda: entry.in_slot is not None or self._take_slot(entry, slots))
            is_mine = entry.in_slot is None
            future = entry.in_slot = entry.in_slot or Future()
            self.counts.hits += not is_mine
            self.counts.copies += is_mine
            slots.touch(entry)
            slot = slots.places[entry]
        if is_mine:
            start = time.perf_counter()
            try:
                slots.stacks.place(slot, loaded.fitted)
            except BaseException as error:
                with self.lock:
                    del slots.places[entry]
                    entry.in_slot = None
                future.set_exception(error)
            else:
                with self.lock:
                    self.counts.copy_seconds += time.perf_counter() - start
                future.set_result(slot)
        return future.result()

    def _replaced(self, entry: Entry) -> Entry | None:
        """What has the name that an entry claims."""
        return None if entry.claim is None else self.names.entries.get(entry.name)

    def _evict(self, victims: Collection[Entry]) -> None:
        """Note what has left memory; it leaves its slot, too."""
        for victim in victims:
            self.counts.evictions_from_memory += 1
            self.counts.evictions_from_slots += victim.in_slot is not None
            self.device.leave(victim)
            victim.leave_memory()
        for victim in victims:
            if victim.source is None and victim.is_named:
                self.retire(victim, evicted(victim.name))

    def _take_slot(self, entry: Entry, slots: SlotLevel) -> bool:
        """Give an entry a slot; False where others, which are being copied, may leave soon."""
        if len(slots.places) == slots.count:
            leaving = slots.evictable()
            if leaving is None:
                self._check_slots(entry, self.held)
                return False
            slots.leave(leaving)
            self.counts.evictions_from_slots += 1
        slots.take(entry)
        return True

    def _read(self, entry: Entry) -> Loaded:
        assert entry.source is not None
        return self.loaded(entry, entry.source.read(self.kept_in_memory))

    def _load(self, entry: Entry, load: Callable[[], Loaded], future: Future[Loaded]) -> None:
        try:
            loaded = load()
            with self.lock:
                self.memory.resize(entry, loaded.fitted.coverage.nbytes)
                self.memory.touch(entry)  # behind what it was made of
                self.memory.check_room(entry, self._replaced(entry))
                self.publish(entry)
                self._evict(self.memory.shrink(entry))
                self.counts.reads += entry.source is not None
                entry.loaded = loaded
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the future keeps it, but nothing read
            with self.lock:
                self.memory.remove(entry)
                entry.leave_memory()
            future.set_exception(error)
            return
        future.set_result(loaded)
