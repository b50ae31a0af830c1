"""Adapters in host memory within a budget of bytes, the least recently used leaving first."""

from collections import OrderedDict

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.managers.slots.cache.entry import Entry


class HostStore:
    """Who is in host memory; its caller holds the cache's lock."""

    def __init__(self, limit: int | None) -> None:
        """Take the budget in bytes; None is no limit."""
        self.limit = limit
        self.used = 0
        self.entries: OrderedDict[Entry, None] = OrderedDict()  # least recently used first

    def reserve(self, entry: Entry) -> list[Entry]:
        """Count an entry in; return those that must leave for it, counted out already.

        Raises:
            StateError: it is larger than the budget, or others that stay leave no room.
        """
        leaving = self._victims(entry)
        for victim in leaving:
            self.remove(victim)
        self.entries[entry] = None
        self.used += entry.nbytes
        return leaving

    def touch(self, entry: Entry) -> None:
        """Make an entry the last one used."""
        self.entries.move_to_end(entry)

    def remove(self, entry: Entry) -> None:
        """Count an entry out."""
        del self.entries[entry]
        self.used -= entry.nbytes

    def _victims(self, entry: Entry) -> list[Entry]:
        if self.limit is None:
            return []
        if entry.nbytes > self.limit:
            raise StateError(
                f"adapter {entry.name!r} takes {entry.nbytes:,} bytes, and the host memory for "
                f"adapters is {self.limit:,}; give the cache a larger host_memory"
            )
        victims, missing = [], self.used + entry.nbytes - self.limit
        for other in self.entries:
            if missing <= 0:
                break
            if other.may_leave:
                victims.append(other)
                missing -= other.nbytes
        if missing > 0:
            holders = ", ".join(other.described() for other in self.entries)
            raise StateError(
                f"adapter {entry.name!r} takes {entry.nbytes:,} bytes of host memory; of "
                f"{self.limit:,} bytes {self.used:,} are held by {holders}; release or unpin "
                "one, or give the cache a larger host_memory"
            )
        return victims
