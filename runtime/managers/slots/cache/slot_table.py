"""Slots of an engine and the adapters in them, the least recently used leaving first."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.managers.slots.cache.entry import Entry


@dataclass(frozen=True)
class Taken:
    """A slot, and who has left it."""

    slot: int
    leaving: Entry | None = None


class SlotTable:
    """Who lies in which slot; its caller holds the cache's lock."""

    def __init__(self, slots: int) -> None:
        """Take the number of slots, from 1."""
        self.slots = slots
        self.places: OrderedDict[Entry, int] = OrderedDict()  # least recently used first

    def check_room(self, entry: Entry, held: Collection[Entry]) -> None:
        """Refuse one more entry to hold, if others hold every slot.

        Raises:
            StateError: they do.
        """
        if entry not in held and len(held) >= self.slots:
            holders = ", ".join(other.described() for other in held)
            raise StateError(
                f"adapter {entry.name!r} finds all {self.slots} slots in use by {holders}; wait "
                "for a sequence to end, unpin an adapter, or build with a larger --max-loras"
            )

    def take(self, entry: Entry) -> Taken | None:
        """Give an entry the lowest free slot, or the least recently used one's.

        Returns:
            None if everybody stays.
        """
        free = set(range(self.slots)).difference(self.places.values())
        if free:
            self.places[entry] = min(free)
            return Taken(min(free))
        for other in self.places:
            if other.may_leave_slot:
                self.places[entry] = self.places.pop(other)
                return Taken(self.places[entry], other)
        return None

    def touch(self, entry: Entry) -> None:
        """Make an entry the last one used."""
        self.places.move_to_end(entry)
