"""Movement of adapters between disk, memory and slots."""

import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from threading import Condition, Event
from weakref import WeakSet

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.memory.host import Stream
from trt_lora.runtime.store.buffer_level import BufferLevel
from trt_lora.runtime.store.entry import Entry, Loaded, check_unchanged
from trt_lora.runtime.store.memory_level import MemoryLevel
from trt_lora.runtime.store.names import Names, evicted
from trt_lora.runtime.store.slot_level import SlotLevel
from trt_lora.runtime.store.source import content_hash
from trt_lora.runtime.store.stats import StoreCounts, StoreStats


@dataclass(frozen=True)
class Naming:
    """How an entry that has come gets its name, if it has none; both are called under the lock."""

    replaced: Callable[[], Entry | None] = lambda: None  # what has the name
    publish: Callable[[], None] = lambda: None  # may refuse


NAMED = Naming()  # of an entry that has its name


class Levels:
    """Memory above slots, where the engine has them: what lies in a slot is in memory too.

    A thread that moves an adapter marks it under `lock`, reads or copies without it, and publishes
    what came of it under it: a move holds up those alone that want that adapter, or its slot.
    """

    def __init__(
        self,
        slots: SlotLevel | None,
        buffers: BufferLevel | None,
        memory: MemoryLevel,
        names: Names,
    ) -> None:
        """Take the levels.

        Args:
            slots: of an engine for many adapters.
            buffers: of an engine for one at a time, instead.
            memory: empty.
            names: empty.
        """
        device = slots or buffers
        assert device is not None
        self.lock = Condition()
        self.slots, self.device, self.memory, self.names = slots, device, memory, names
        self.held: dict[Entry, None] = {}  # the entries with `is_held`
        self.counts = StoreCounts()
        self._watchers: WeakSet[Event] = WeakSet()

    def watch(self, event: Event) -> None:
        """Set an event whenever an adapter has come or was let go of, as long as it lives."""
        with self.lock:
            self._watchers.add(event)

    def notify(self) -> None:
        """Set the events of those that watch."""
        with self.lock:
            watchers = list(self._watchers)
        for event in watchers:
            event.set()

    def retire(self, entry: Entry, why: LoRAError | None = None) -> None:
        """Take its name from an entry, and theirs from all that is made of it; under `lock`."""
        self.let_go(self.names.remove(entry, why))

    def let_go(self, entries: Iterable[Entry]) -> None:
        """Drop what has lost its name and is not leased; its pin ends with it; under `lock`."""
        for entry in entries:
            entry.is_pinned = False
            self.after_change(entry)

    def hold(self, entry: Entry) -> None:
        """Count a lease; under `lock`.

        Raises:
            StateError: others hold all slots.
        """
        self.device.check_room(entry, self.held)
        entry.leases += 1
        self.held[entry] = None

    def unhold(self, entry: Entry) -> None:
        """Count a lease out; under `lock`."""
        entry.leases -= 1
        self.after_change(entry)

    def pin(self, entry: Entry, held: Collection[Entry] | None = None) -> None:
        """Keep an entry in its slot, or in memory; under `lock`.

        Raises:
            StateError: others hold all slots; `held` says which, where that is about to change.
        """
        self.device.check_room(entry, self.held if held is None else held)
        entry.is_pinned = True
        self.held[entry] = None

    def take_over_pin(self, entry: Entry, old: Entry) -> None:
        """Pin an entry that takes the name of one that is pinned, if it is; under `lock`.

        Raises:
            StateError: others hold all slots, sequences of the old one among them.
        """
        if old.is_pinned:
            self.pin(entry, [e for e in self.held if e is not old or old.leases])

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
            entry.in_memory = None

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

    def stats(self, registered: int) -> StoreStats:
        """Return what is where; under `lock`."""
        slots = self.slots
        return StoreStats(
            registered=registered,
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

    def put(self, entry: Entry, loaded: Loaded, naming: Naming) -> None:
        """Keep an adapter whose weights are in memory already.

        Raises:
            StateError: it finds no room.
            AdapterError, StateError: the name cannot be had.
        """
        with self.lock:
            self._reserve(entry, naming)
            entry.in_memory = Future()
            entry.in_memory.set_result(loaded)
            try:
                self._arrive(entry, naming)
            except BaseException:
                self.memory.remove(entry)
                entry.in_memory = None
                raise

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
        there = entry.in_memory if self.slots is None else entry.in_slot
        return there is not None and there.done()

    def to_memory(
        self,
        entry: Entry,
        read: Callable[[], Fitted] | None = None,
        naming: Naming = NAMED,
        stream: Stream = None,
    ) -> Loaded:
        """Return an adapter in memory, read from its source if it is not there.

        Args:
            entry: of the adapter; held, or kept by `moving`.
            read: how, if not by its source.
            naming: gives the entry its name when it is there.
            stream: of a copy to the device.

        Raises:
            AdapterError: its files are gone, damaged, or hold another adapter than they did.
            StateError: it finds no room.
            AdapterError, StateError: the name cannot be had.
        """
        with self.lock:
            future, is_mine = entry.in_memory, entry.in_memory is None
            if future is None:
                if entry.source is None:
                    raise evicted(entry.name)
                self._reserve(entry, naming)
                future = entry.in_memory = Future()
                read = read or partial(entry.source.read, self.kept_in_memory)
            self.memory.touch(entry)
        if is_mine:
            assert read is not None
            self._read(entry, read, future, naming, stream)
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
            self._copy(entry, slot, loaded.fitted, future, slots)
        return future.result()

    def _reserve(self, entry: Entry, naming: Naming) -> None:
        """Make room in memory, as far as others can be read again."""
        self._evict(self.memory.reserve(entry, naming.replaced()))

    def _arrive(self, entry: Entry, naming: Naming) -> None:
        """Give an entry that is there its name, and let go of what leaves for it, or do neither."""
        self.memory.check_room(entry, naming.replaced())
        naming.publish()
        self._evict(self.memory.shrink(entry))

    def _evict(self, victims: Collection[Entry]) -> None:
        """Note what has left memory; it leaves its slot, too."""
        for victim in victims:
            self.counts.evictions_from_memory += 1
            self.counts.evictions_from_slots += victim.in_slot is not None
            self.device.leave(victim)
            victim.in_memory = None
        for victim in victims:
            if victim.source is None and victim.is_named:
                self.retire(victim, evicted(victim.name))

    def _take_slot(self, entry: Entry, slots: SlotLevel) -> bool:
        """Give an entry a slot; False where others, which are being copied, may leave soon."""
        taken = slots.take(entry)
        if taken is None:
            slots.check_room(entry, self.held)
            return False
        if taken.leaving is not None:
            taken.leaving.in_slot = None
            self.counts.evictions_from_slots += 1
        return True

    def _read(
        self,
        entry: Entry,
        read: Callable[[], Fitted],
        future: Future[Loaded],
        naming: Naming,
        stream: Stream,
    ) -> None:
        try:
            fitted = read()
            digest = content_hash(fitted)
            check_unchanged(entry, fitted, digest)
            loaded = self.device.load(fitted, stream)
            with self.lock:
                entry.content_hash = digest
                self.memory.resize(entry, fitted.coverage.nbytes)
                self.memory.touch(entry)  # behind what it was made of
                self._arrive(entry, naming)
                self.counts.reads += 1
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the future keeps it, but nothing read
            with self.lock:
                self.memory.remove(entry)
                entry.in_memory = None
            future.set_exception(error)
            return
        future.set_result(loaded)

    def _copy(
        self, entry: Entry, slot: int, fitted: Fitted, future: Future[int], slots: SlotLevel
    ) -> None:
        start = time.perf_counter()
        try:
            slots.stacks.place(slot, fitted)
        except BaseException as error:
            with self.lock:
                del slots.places[entry]
                entry.in_slot = None
            future.set_exception(error)
            return
        with self.lock:
            self.counts.copy_seconds += time.perf_counter() - start
        future.set_result(slot)
