"""The conservation law of the adapter cache: bytes, slots and leases add up."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.managers.slots.cache.cache_levels import CacheLevels
from trt_lora.runtime.managers.slots.cache.entry import Entry, Lease


def check_integrity(
    levels: CacheLevels, entries: Mapping[str, Entry], leases: Collection[Lease]
) -> None:
    """Compare what the levels count with what they hold; under the cache's lock.

    Raises:
        StateError: something does not add up; the message lists all of it.
    """
    faults = [
        *_host_faults(levels),
        *_slot_faults(levels),
        *_lease_faults(levels, leases),
        *_name_faults(levels, entries),
    ]
    if faults:
        raise StateError(f"the adapter cache does not add up: {'; '.join(faults)}")


def _host_faults(levels: CacheLevels) -> Iterator[str]:
    host = levels.host
    counted = sum(entry.nbytes for entry in host.entries)
    if host.used != counted:
        yield f"{host.used} bytes are counted on the host, its adapters have {counted}"
    # Room for what is being read may be made when it has come, see `HostStore`.
    there = sum(entry.nbytes for entry in host.entries if entry.is_read)
    if host.limit is not None and there > host.limit:
        yield f"{there} bytes on the host are more than its limit of {host.limit}"
    for entry in host.entries:
        if entry.on_host is None:
            yield f"{entry.described()} is counted on the host and is not there"
        elif entry.on_host.done():
            held = sum(t.nbytes for t in entry.on_host.result().tensors.values())
            if held != entry.nbytes:
                yield f"{entry.described()} has {held} bytes and is counted as {entry.nbytes}"


def _slot_faults(levels: CacheLevels) -> Iterator[str]:
    places = levels.table.places
    if len(set(places.values())) < len(places):
        yield f"adapters share a slot: {[(e.name, slot) for e, slot in places.items()]}"
    if not set(places.values()) <= set(range(levels.table.slots)):
        yield f"slots {sorted(places.values())} of {levels.table.slots}"
    for entry, slot in places.items():
        if entry not in levels.host.entries:
            yield f"{entry.described()} is in slot {slot} and not on the host"
        if entry.in_slot is None or (entry.in_slot.done() and entry.in_slot.result() != slot):
            yield f"{entry.described()} does not know its slot {slot}"


def _lease_faults(levels: CacheLevels, leases: Collection[Lease]) -> Iterator[str]:
    given = Counter(lease.entry for lease in leases)
    for entry in given.keys() | levels.held.keys():
        if entry.leases != given[entry]:
            yield f"{entry.described()} has {given[entry]} leases"
        if entry not in levels.held or not entry.is_held:
            yield f"{entry.described()} is counted as held: {entry in levels.held}"
    if len(levels.held) > levels.table.slots:
        yield f"{len(levels.held)} adapters are held, there are {levels.table.slots} slots"


def _name_faults(levels: CacheLevels, entries: Mapping[str, Entry]) -> Iterator[str]:
    named = set(entries.values())
    for entry in named | levels.host.entries.keys() | levels.held.keys():
        if entry.is_named != (entry in named):
            yield f"{entry.described()} is named: {entry in named}, marked: {entry.is_named}"
        if not entry.is_named and entry.may_leave:
            yield f"{entry.described()} has no name, nobody holds it, and it is still there"
