"""Catalog: entries with versions of their own get names, in the place of others or not."""

from itertools import count

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.store.entry import Entry
from trt_lora.runtime.store.levels import Levels, Naming
from trt_lora.runtime.store.source import Source


class Catalog:
    """How entries get their names."""

    def __init__(self, levels: Levels) -> None:
        """Begin without names."""
        self._levels, self._names, self._versions = levels, levels.names, count(1)

    def check_new(self, name: str, *, replace: bool, expected_version: int | None) -> None:
        """Refuse a name that a new adapter cannot have; see `Names.check_new`."""
        with self._levels.lock:
            self._names.check_new(name, replace=replace, expected_version=expected_version)

    def entry(
        self, name: str, source: Source | None, nbytes: int, parts: tuple[Entry, ...] = ()
    ) -> Entry:
        """Return an entry with a version of its own, and no name yet."""
        return Entry(name, next(self._versions), source, nbytes, parts)

    def naming(self, entry: Entry, *, replace: bool, expected_version: int | None) -> Naming:
        """Return how an entry gets its name when it is in memory."""
        return Naming(
            lambda: self._names.entries.get(entry.name),
            lambda: self.publish(entry, replace=replace, expected_version=expected_version),
        )

    def publish(self, entry: Entry, *, replace: bool, expected_version: int | None) -> None:
        """Let the name mean an entry from now on, unless it was taken meanwhile; under the lock.

        Raises:
            AdapterError, StateError: the name cannot be had, or parts have lost theirs.
        """
        self._names.check_new(entry.name, replace=replace, expected_version=expected_version)
        if gone := [part.name for part in entry.parts if not part.is_named]:
            raise StateError(f"blend {entry.name!r}: {gone} were unloaded or replaced meanwhile")
        old = self._names.entries.get(entry.name)
        if old is not None:
            self._levels.take_over_pin(entry, old)
        self._levels.let_go(self._names.set(entry))

    def drop_idle_strength(self) -> None:
        """Let go of a strength that is not in use, if there are many; under the lock."""
        if (entry := self._names.idle_strength()) is not None:
            self._levels.retire(entry)


def logged(coverage: Coverage) -> Coverage:
    """Write the warnings of a load to the log, and return its coverage."""
    log_warnings(coverage.source, coverage.warnings)
    return coverage
