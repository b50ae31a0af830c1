"""StepBindings: what a run of the engine binds of the adapters, by name or by lease."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from threading import Event

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import StateError
from trt_lora.runtime.memory.tensor import TensorMap
from trt_lora.runtime.store.entry import Entry, Lease
from trt_lora.runtime.store.levels import Levels

AdapterOfRow = Lease | str | None  # None is the base model


class StepBindings:
    """The LoRA inputs of runs; any thread may call it."""

    def __init__(self, levels: Levels) -> None:
        """Take what the store knows."""
        self._levels = levels

    @property
    def resident(self) -> AbstractSet[str]:
        """The names whose adapters a step can bind at once: in slots, or in the engine's memory."""
        with self._levels.lock:
            return {entry.name for entry in self._levels.names if self._levels.is_resident(entry)}

    @property
    def loaded(self) -> AbstractSet[str]:
        """The names whose adapters are in memory."""
        with self._levels.lock:
            return {entry.name for entry in self._levels.names if entry.is_loaded}

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of every name that has one."""
        with self._levels.lock:
            slots = self._levels.slots
            places = {} if slots is None else slots.places
            return {entry.name: slot for entry, slot in places.items() if entry.is_named}

    @property
    def slot_count(self) -> int | None:
        """How many slots there are; None on an engine for one adapter at a time."""
        slots = self._levels.slots
        return None if slots is None else slots.count

    @property
    def by_use(self) -> tuple[str, ...]:
        """The adapters, the least recently used first."""
        with self._levels.lock:
            names = self._levels.names.entries
            loaded = [e.name for e in self._levels.memory.entries if names.get(e.name) is e]
            return (*(name for name in names if name not in loaded), *loaded)

    @checked
    def touch(self, name: str) -> None:
        """Make an adapter the last one used, if it is in memory.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._levels.lock:
            self._levels.touch(self._levels.names.get(name))

    @checked
    def activate(self, adapter: Lease | str) -> int | None:
        """Bring an adapter to where a run can bind it; return its slot, where there are some.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: sequences hold all slots, memory has no room, or the lease was released.
            AdapterError: its files are needed, and are gone, damaged or changed.
        """
        with self._levels.moving(lambda: self._entry_of(adapter)) as entry:
            return self._levels.to_device(entry)

    @checked
    def deactivate(self, name: str) -> bool:
        """Take an adapter out of its slot; False if it has none, or is held.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._levels.lock:
            entry = self._levels.names.get(name)
            is_free = entry.in_slot is not None and entry.is_evictable_from_slot
            if is_free:
                self._levels.device.leave(entry)
        self._levels.notify()
        return is_free

    @checked
    def groups(self, adapters: Sequence[AdapterOfRow]) -> list[list[int]]:
        """Return the rows that one run can take together, by their places, in their order.

        With slots these are all of them; without, those of each adapter.
        """
        if self._levels.slots is not None:
            return [list(range(len(adapters)))]
        groups: dict[Entry | None, list[int]] = {}
        with self._levels.lock:
            for row, adapter in enumerate(adapters):
                groups.setdefault(self._entry_of(adapter) if adapter else None, []).append(row)
        return list(groups.values())

    @checked
    def rows(self, adapters: Sequence[AdapterOfRow], *, all_slots: bool = False) -> TensorMap:
        """Return the LoRA inputs of a run of rows.

        With slots: the stacks, and the slot of each row; on the host the stacks begin and end with
        the slots that the rows take. Without: the tensors of the one adapter that all rows take,
        and rank-1 dummies elsewhere.

        Args:
            adapters: of each row; None is the base model.
            all_slots: bind every slot on the host too, at the cost of all of them. From rank 32 on
                the bits of a row with an adapter may depend on how many are bound; then they depend
                on nothing that the other rows take.

        Returns:
            The same object as before for the same rows; it is not to be written to.

        Raises:
            UnknownAdapterError, AdapterError: as `activate`.
            StateError: the rows take more adapters than there are slots, or others hold them; or
                they take several without slots.
        """
        with self._levels.lock:
            entries = [None if adapter is None else self._entry_of(adapter) for adapter in adapters]
            wanted = dict.fromkeys(entry for entry in entries if entry is not None)
            if self._levels.find(wanted):
                return self._levels.device.rows(entries, all_slots=all_slots)
        with self._held(wanted):
            for entry in wanted:
                self._levels.to_device(entry)
            with self._levels.lock:
                return self._levels.device.rows(entries, all_slots=all_slots)

    @contextmanager
    def held(self, adapters: Sequence[AdapterOfRow]) -> Iterator[TensorMap]:
        """Yield what `rows` returns, whose adapters stay where they are until the block ends.

        Raises:
            UnknownAdapterError, AdapterError, StateError: as `rows`.
        """
        with ExitStack() as stack:
            with self._levels.lock:
                entries = [None if each is None else self._entry_of(each) for each in adapters]
                different = dict.fromkeys(entry for entry in entries if entry is not None)
                leases = stack.enter_context(self._held(different))
            yield self.rows([None if entry is None else leases[entry] for entry in entries])

    def _entry_of(self, adapter: Lease | str) -> Entry:
        if not isinstance(adapter, Lease):
            return self._levels.names.get(adapter)
        self._levels.check_lease(adapter)
        return adapter.entry

    @checked
    def watch(self, event: Event) -> None:
        """Set an event whenever an adapter has come or was let go of, as long as it lives."""
        with self._levels.lock:
            self._levels.watchers.add(event)

    @contextmanager
    def _held(self, entries: Collection[Entry]) -> Iterator[Mapping[Entry, Lease]]:
        """Hold all adapters of a run while they are brought to where it can bind them."""
        slots = self._levels.slots
        if slots is not None and len(entries) > slots.count:
            raise StateError(
                f"{len(entries)} adapters in one step are more than this engine's {slots.count} "
                "slots; split the rows, or build with a larger --max-loras"
            )
        with self._levels.lock:
            leases = dict(zip(entries, self._levels.lease_all(entries), strict=True))
        try:
            yield leases
        finally:
            with self._levels.lock:
                for lease in leases.values():
                    self._levels.release(lease)
            self._levels.notify()
