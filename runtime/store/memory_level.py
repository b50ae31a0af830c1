"""MemoryLevel: LRU of adapters in memory, within a budget of bytes.

An adapter whose weights came in memory cannot be read again, so it leaves only once the one that
takes its place is there: what is read to take it may turn out to be damaged. Until then the budget
may be exceeded by the one that is read.
"""

from collections import OrderedDict
from collections.abc import Iterator

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.store.entry import Entry


class MemoryLevel:
    """The adapters that are in memory; its caller holds the store's lock."""

    def __init__(self, limit: int | None, option: str) -> None:
        """Take the budget in bytes, None for no limit, and the `StoreConfig` option it is from."""
        self.limit, self._option = limit, option
        self.used = 0
        self.entries: OrderedDict[Entry, None] = OrderedDict()  # least recently used first

    def reserve(self, entry: Entry, replaced: Entry | None = None) -> list[Entry]:
        """Count an entry in; return those that leave for it at once, counted out already.

        Args:
            entry: that is to be read.
            replaced: what has its name, and leaves when the entry gets it.

        Raises:
            StateError: it is larger than the budget, or others that stay leave no room.
        """
        self.check_room(entry, replaced)
        leaving = [other for other in self._victims(entry, replaced) if other.source is not None]
        for victim in leaving:
            self.remove(victim)
        self.entries[entry] = None
        self.used += entry.nbytes
        return leaving

    def check_room(self, entry: Entry, replaced: Entry | None = None) -> None:
        """Refuse an entry for which not enough others can leave; as `reserve`."""
        if self.limit is None or self._missing(entry) <= 0:
            return
        if entry.nbytes > self.limit:
            raise StateError(
                f"adapter {entry.name!r} takes {entry.nbytes:,} bytes, and the memory for "
                f"adapters is {self.limit:,}; give StoreConfig a larger {self._option}"
            )
        others = [other for other in self.entries if other is not entry]
        stay = [other for other in others if not _leaves(other, replaced)]
        if (held := sum(other.nbytes for other in stay)) + entry.nbytes > self.limit:
            holders = ", ".join(other.describe() for other in stay)
            raise StateError(
                f"adapter {entry.name!r} takes {entry.nbytes:,} bytes of memory; of "
                f"{self.limit:,} bytes {held:,} are held by {holders}; release or unpin "
                f"one, or give StoreConfig a larger {self._option}"
            )

    def shrink(self, entry: Entry) -> list[Entry]:
        """Count others out until an entry that has come has its room; return them."""
        leaving = list(self._victims(entry, None))
        for victim in leaving:
            self.remove(victim)
        return leaving

    def resize(self, entry: Entry, nbytes: int) -> None:
        """Take note of the size of an entry that could not be known before it was made."""
        self.used += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def touch(self, entry: Entry) -> None:
        """Make an entry the last one used."""
        self.entries.move_to_end(entry)

    def remove(self, entry: Entry) -> None:
        """Count an entry out."""
        del self.entries[entry]
        self.used -= entry.nbytes

    def _missing(self, entry: Entry) -> int:
        """How many bytes too many there are, with an entry that may be counted in already."""
        more = 0 if entry in self.entries else entry.nbytes
        return 0 if self.limit is None else self.used + more - self.limit

    def _victims(self, entry: Entry, replaced: Entry | None) -> Iterator[Entry]:
        """Who leaves for an entry, if `replaced` does when the entry gets its name."""
        missing = self._missing(entry)
        if replaced is not None and _leaves(replaced, replaced) and replaced in self.entries:
            missing -= replaced.nbytes
        for other in list(self.entries):
            if missing <= 0:
                return
            if other not in (entry, replaced) and other.is_evictable:
                yield other
                missing -= other.nbytes


def _leaves(entry: Entry, replaced: Entry | None) -> bool:
    """Whether an entry can be evicted; one that is replaced loses its pin."""
    return entry.is_evictable or (entry is replaced and not entry.leases and not entry.moving)
