"""Loading, replacing and unloading of the adapters of an engine for many."""

from concurrent.futures import Future
from itertools import count
from pathlib import Path

from trt_lora.plugins.checked import checked
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter
from trt_lora.runtime.managers.slots.cache.adapter_source import (
    AdapterSource,
    content_hash,
    host_nbytes,
)
from trt_lora.runtime.managers.slots.cache.cache_levels import CacheLevels, Naming
from trt_lora.runtime.managers.slots.cache.entry import Entry
from trt_lora.runtime.managers.slots.cache.names import Names
from trt_lora.runtime.managers.slots.slot_stacks import SlotStacks
from trt_lora.runtime.manifest import Manifest


class AdapterCatalog:
    """The named adapters of an engine with slots: what `SlotAdapters` does without any row."""

    @checked
    def __init__(self, manifest: Manifest, stacks: SlotStacks, host_limit: int | None) -> None:
        """Take the engine's slots, and the limit of host memory in bytes."""
        self.stacks = stacks
        self._manifest, self._names = manifest, Names()
        self._levels = CacheLevels(stacks, host_limit, self._names.forget)
        self._lock = self._levels.lock
        self._generations = count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters, in the order of loading."""
        with self._lock:
            return tuple(self._names.entries)

    @checked
    def load_weights(
        self,
        name: str,
        path: str | Path,
        *,
        strict: bool = True,
        replace: bool = False,
        expected_generation: int | None = None,
    ) -> Coverage:
        """Load an adapter into host memory.

        Args:
            name: what rows will call it.
            path: what `load_adapter` reads.
            strict: as in `LoRAManager.load_weights`.
            replace: take the place of an adapter of that name, if there is one, and its pin. Rows
                that have it keep it; until they end, both are in memory.
            expected_generation: replace this generation and no other; 0 is no adapter at all.

        Raises:
            AdapterError: the name is taken or is no name, the adapter cannot be read, or the engine
                cannot take it. What had the name before keeps it.
            StateError: the name means another generation, host memory has no room, or what it
                replaces is pinned and sequences hold all slots.
        """
        self._check_new(name, replace, expected_generation)
        source = AdapterSource(self._manifest, Path(path).absolute(), strict)
        adapter = source.open()
        entry = self._entry(name, source, source.preview(adapter))
        naming = self._naming(entry, replace, expected_generation)
        with self._levels.moving(lambda: entry):
            fitted = self._levels.to_host(entry, adapter, naming)
            self._place_pinned(entry)
        return _logged(fitted.coverage)

    @checked
    def register(self, name: str, path: str | Path, *, strict: bool = True) -> Coverage:
        """Check an adapter, and read its values when they are wanted for the first time.

        Then its files have to be what they are now, by their sizes and a sample of their bytes.

        Raises:
            AdapterError: as `load_weights`.
        """
        self._check_new(name, replace=False, expected_generation=None)
        source = AdapterSource(self._manifest, Path(path).absolute(), strict)
        fingerprint = source.fingerprint()  # before it is opened: a change after it is seen
        coverage = source.preview(source.open())
        entry = self._entry(name, source, coverage)
        entry.fingerprint = fingerprint
        with self._lock:
            self._publish(entry, replace=False, expected_generation=None)
        return _logged(coverage)

    @checked
    def add_adapter(
        self,
        name: str,
        adapter: Adapter,
        *,
        strict: bool = True,
        replace: bool = False,
        expected_generation: int | None = None,
    ) -> Coverage:
        """Keep an adapter whose weights are in memory; once evicted it must be added again.

        Raises:
            AdapterError, StateError: as `load_weights`.
        """
        self._check_new(name, replace, expected_generation)
        fitted = fit_adapter(adapter, self._manifest, strict=strict)
        entry = self._entry(name, None, fitted.coverage)
        entry.content_hash = content_hash(fitted)
        naming = self._naming(entry, replace, expected_generation)
        with self._levels.moving(lambda: entry):
            self._levels.put(entry, fitted, naming)
            self._place_pinned(entry)
        return _logged(fitted.coverage)

    @checked
    def unload(self, name: str, *, expected_generation: int | None = None) -> None:
        """Forget an adapter: nobody can take it any more.

        Its memory is free when the last lease of it is released, at once if there is none. A pin
        ends.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: the name means another generation.
        """
        with self._lock:
            entry = self._names.get(name, expected_generation)
            del self._names.entries[name]
            self._retire(entry)

    @checked
    def generation(self, name: str) -> int:
        """Return the generation that a name means: a number that no other adapter here has.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            return self._names.get(name).generation

    @checked
    def content_hash(self, name: str) -> str:
        """Return the SHA-256 of an adapter's weights as the engine takes them; read if need be.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            AdapterError: its files are needed, and cannot be read.
        """
        with self._levels.moving(lambda: self._names.get(name)) as entry:
            if not entry.content_hash:
                self._levels.to_host(entry)
        return entry.content_hash

    @checked
    def get_coverage(self, name: str) -> Coverage:
        """Return what became of an adapter's tensors; its headers are read again if need be.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            AdapterError: its files are needed, and cannot be read.
        """
        with self._lock:
            entry = self._names.get(name)
            fitted: Future[Fitted] | None = entry.on_host
        if fitted is not None:
            return fitted.result().coverage
        assert entry.source is not None
        return entry.source.preview(entry.source.open())

    def _entry(self, name: str, source: AdapterSource | None, coverage: Coverage) -> Entry:
        return Entry(name, next(self._generations), source, host_nbytes(coverage))

    def _check_new(self, name: str, replace: bool, expected_generation: int | None) -> None:
        with self._lock:
            self._names.check_new(name, replace=replace, expected_generation=expected_generation)

    def _naming(self, entry: Entry, replace: bool, expected_generation: int | None) -> Naming:
        return Naming(
            lambda: self._names.entries.get(entry.name),
            lambda: self._publish(entry, replace, expected_generation),
        )

    def _place_pinned(self, entry: Entry) -> None:
        """Bring an entry that has taken over a pin into its slot."""
        if entry.is_pinned:
            self._levels.to_slot(entry)

    def _publish(self, entry: Entry, replace: bool, expected_generation: int | None) -> None:
        """Let the name mean an entry from now on, unless it was taken meanwhile; under the lock."""
        self._names.check_new(entry.name, replace=replace, expected_generation=expected_generation)
        old = self._names.entries.get(entry.name)
        if old is not None:
            self._levels.take_over_pin(entry, old)
        self._names.set(entry)
        entry.is_named = True
        if old is not None:
            self._retire(old)

    def _retire(self, entry: Entry) -> None:
        entry.is_named = entry.is_pinned = False
        self._levels.settle(entry)


def _logged(coverage: Coverage) -> Coverage:
    log_warnings(coverage.source, coverage.warnings)
    return coverage
