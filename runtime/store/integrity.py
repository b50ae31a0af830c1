"""The conservation law of an adapter store: bytes, slots and leases add up."""

from collections import Counter
from collections.abc import Iterator

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.store.entry import Entry
from trt_lora.runtime.store.levels import Levels
from trt_lora.runtime.store.slot_level import SlotLevel


def check_integrity(levels: Levels) -> None:
    """Compare what the levels count with what they hold; under the store's lock.

    Raises:
        StateError: something does not add up; the message lists all of it.
    """
    faults = [
        *_memory_faults(levels),
        *(_slot_faults(levels, levels.slots) if levels.slots else ()),
        *_lease_faults(levels),
        *_name_faults(levels, set(levels.names)),
    ]
    if faults:
        raise StateError(f"the adapter store does not add up: {'; '.join(faults)}")


def _memory_faults(levels: Levels) -> Iterator[str]:
    memory = levels.memory
    counted = sum(entry.nbytes for entry in memory.entries)
    if memory.used != counted:
        yield f"{memory.used} bytes are counted in memory, its adapters have {counted}"
    # Room for what is being read may be made when it has come, see `MemoryLevel`.
    there = sum(entry.nbytes for entry in memory.entries if entry.is_loaded)
    if memory.limit is not None and there > memory.limit:
        yield f"{there} bytes in memory are more than its limit of {memory.limit}"
    for entry in memory.entries:
        if entry.in_memory is None:
            yield f"{entry.describe()} is counted in memory and is not there"
        elif entry.loaded is not None:
            held = sum(t.nbytes for t in entry.loaded.fitted.tensors.values())
            if held != entry.nbytes:
                yield f"{entry.describe()} has {held} bytes and is counted as {entry.nbytes}"


def _slot_faults(levels: Levels, slots: SlotLevel) -> Iterator[str]:
    places = slots.places
    if len(set(places.values())) < len(places):
        yield f"adapters share a slot: {[(e.name, slot) for e, slot in places.items()]}"
    if not set(places.values()) <= set(range(slots.count)):
        yield f"slots {sorted(places.values())} of {slots.count}"
    for entry, slot in places.items():
        if entry not in levels.memory.entries:
            yield f"{entry.describe()} is in slot {slot} and not in memory"
        if entry.in_slot is None or (entry.in_slot.done() and entry.in_slot.result() != slot):
            yield f"{entry.describe()} does not know its slot {slot}"
    if len(levels.held) > slots.count:
        yield f"{len(levels.held)} adapters are held, there are {slots.count} slots"


def _lease_faults(levels: Levels) -> Iterator[str]:
    given = Counter(lease.entry for lease in levels.leases)
    for entry in given.keys() | levels.held.keys():
        if entry.leases != given[entry]:
            yield f"{entry.describe()} has {given[entry]} leases"
        if entry not in levels.held or not entry.is_held:
            yield f"{entry.describe()} is counted as held: {entry in levels.held}"


def _name_faults(levels: Levels, named: set[Entry]) -> Iterator[str]:
    for entry in named | levels.memory.entries.keys() | levels.held.keys():
        if entry.is_named != (entry in named):
            yield f"{entry.describe()} is named: {entry in named}, marked: {entry.is_named}"
        if not entry.is_named and entry.is_evictable:
            yield f"{entry.describe()} has no name, is not held, and is still there"
        if entry.is_named and not all(part.is_named for part in entry.parts):
            yield f"{entry.describe()} is made of adapters that have no name"
