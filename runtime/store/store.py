"""AdapterStore: the adapters of one engine, by name, in versions, wherever each of them lies."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import StateError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.blend import Parts
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.load import files_fingerprint
from trt_lora.runtime.engines.engine import Executor, directory_of
from trt_lora.runtime.memory.host import Stream, free_host_memory
from trt_lora.runtime.memory.tensor import Tensor
from trt_lora.runtime.store.blend_source import coverage_of
from trt_lora.runtime.store.buffer_level import BufferLevel
from trt_lora.runtime.store.config import StoreConfig, bytes_of
from trt_lora.runtime.store.entry import Claim, Entry, Lease, Loaded
from trt_lora.runtime.store.integrity import check_integrity
from trt_lora.runtime.store.levels import Levels
from trt_lora.runtime.store.memory_level import MemoryLevel
from trt_lora.runtime.store.names import Names
from trt_lora.runtime.store.prefetcher import Prefetcher
from trt_lora.runtime.store.rewriting import Rewriter
from trt_lora.runtime.store.slot_level import SlotLevel
from trt_lora.runtime.store.source import FileSource, Fit, content_hash
from trt_lora.runtime.store.stats import AdapterInfo, StoreStats
from trt_lora.runtime.store.step_bindings import StepBindings


class AdapterStore:
    """Named adapters of a running engine: on disk, in memory, and where a step can bind them.

    On an engine for many adapters those lie in *slots*, copied from host memory; on one for one at
    a time in buffers of their own on its device, and a switch binds pointers. Where memory or a
    slot is wanted, the adapter that was used least recently leaves, unless it is leased or pinned.
    One that was loaded from disk is read again when it is wanted, and must be the same then.

    A name means one *version* of an adapter at a time. Loading with `replace` makes a new one;
    leases of the old one keep it, and its memory is free when the last is released. A blend, and an
    adapter at another strength ("json@0.5" wherever a name is taken), are made of versions when
    they are wanted, can be evicted like all, and lose their names with any of their parts.

    Threads: every method may be called from any thread. Files are read and adapters copied without
    holding up a thread that wants others. A step reads slots, and blends, as long as it runs: where
    other threads load or blend meanwhile, it needs leases of its adapters, as a `Scheduler` has.
    """

    @checked
    def __init__(self, executor: Executor, config: StoreConfig | None = None) -> None:
        """Allocate the engine's slots, or the zero buffer of its dummies.

        Raises:
            ConfigError: a limit has room for no slot.
            BackendError: the device is out of memory.
        """
        config, self.manifest = config or StoreConfig(), executor.manifest
        device: SlotLevel | BufferLevel
        if self.manifest.max_loras:
            device, multiple = SlotLevel(executor, config.device_memory), 1
            limit, option, free = config.host_memory, "host_memory", free_host_memory
        else:
            device, multiple = BufferLevel(executor), executor.rank_multiple
            limit, option, free = config.device_memory, "device_memory", executor.memory.free_bytes
        self._fit = Fit(self.manifest, multiple, directory_of(executor))
        self._names, self._versions = Names(self._fit), count(1)
        self._levels = Levels(device, MemoryLevel(bytes_of(limit, free), option), self._names)
        self._lock, self._prefetcher = self._levels.lock, Prefetcher(self._levels)
        self.bindings, self._rewriter = StepBindings(self._levels), Rewriter(self._levels)

    def __repr__(self) -> str:
        """Return how many adapters it knows, and how many of them a step can bind at once."""
        resident = len(self.bindings.resident)
        return f"<AdapterStore of {len(self.names)} adapters, {resident} resident>"

    def close(self) -> None:
        """Drop what waits to be prefetched, and end the thread that does it."""
        self._prefetcher.close()

    @property
    def zero(self) -> Tensor:
        """A zero of shape [1] in the engine's memory, which no run writes to."""
        return self._levels.device.zero

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters, in the order of loading."""
        with self._lock:
            return tuple(self._names.entries)

    @property
    def pinned(self) -> AbstractSet[str]:
        """The adapters that are pinned."""
        with self._lock:
            return {entry.name for entry in self._names if entry.is_pinned}

    @property
    def stats(self) -> StoreStats:
        """What is where, and what has happened."""
        with self._lock:
            return self._levels.stats()

    @checked
    def info(self, name: str) -> AdapterInfo:
        """Return what is known of an adapter now; see `AdapterInfo`.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            entry = self._names.get(name)
            return entry.info(is_resident=self._levels.is_resident(entry))

    @checked
    def hash_of(self, adapter: Adapter) -> str:
        """Return the SHA-256 of an adapter's weights as the engine takes them.

        Raises:
            AdapterError: the engine cannot take it.
        """
        return content_hash(self._fit.read(adapter, strict=True))

    @checked
    def get_coverage(self, name: str) -> Coverage:
        """Return what became of an adapter's tensors; its headers are read again if need be.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            AdapterError: its files are needed, and cannot be read.
        """
        with self._lock:
            entry = self._names.get(name)
        return coverage_of(entry)

    @checked
    def load(
        self,
        name: str,
        path: str | Path,
        *,
        strict: bool = True,
        replace: bool = False,
        expected_version: int | None = None,
        stream: Stream = None,
    ) -> Coverage:
        """Read an adapter into memory.

        Args:
            name: what it is called from then on.
            path: what `load_adapter` reads.
            strict: False lists tensors without a binding, instead of refusing the adapter.
            replace: take the place of an adapter of that name, if there is one, and its pin. Leases
                of it keep it; until they end, both are in memory.
            expected_version: replace this version and no other; 0 is no adapter at all.
            stream: CUDA stream of the copy to the device, without slots.

        Raises:
            AdapterError: the name is taken or is no name, the adapter cannot be read, or the engine
                cannot take it. What had the name before keeps it.
            StateError: it means another version, memory has no room, or a pin finds no slot.
        """
        claim = self._claim(name, replace, expected_version)
        source = FileSource(self._fit, Path(path).absolute(), strict)
        adapter = source.open()
        nbytes = self._fit.preview(adapter, strict=strict).nbytes
        entry = Entry(name, next(self._versions), source, nbytes, claim=claim)
        read = partial(self._fit.read, adapter, strict=strict)
        return self._come(entry, lambda: self._levels.loaded(entry, read(), stream))

    @checked
    def register(
        self, name: str, path: str | Path, *, strict: bool = True, replace: bool = False
    ) -> Coverage:
        """Check an adapter, and read its values when they are wanted for the first time.

        Then its files have to be what they are now, by their sizes and a sample of their bytes. The
        arguments are those of `load`.

        Raises:
            AdapterError: as `load`.
        """
        claim = self._claim(name, replace)
        path = Path(path).absolute()
        source = FileSource(self._fit, path, strict, files_fingerprint(path))  # before it is opened
        coverage = source.preview()
        entry = Entry(name, next(self._versions), source, coverage.nbytes, claim=claim)
        return self._publish(entry, coverage)

    @checked
    def add(
        self,
        name: str,
        adapter: Adapter,
        *,
        strict: bool = True,
        replace: bool = False,
        expected_version: int | None = None,
    ) -> Coverage:
        """Keep an adapter whose weights are in memory; once evicted it must be added again.

        Raises:
            AdapterError, StateError: as `load`.
        """
        claim = self._claim(name, replace, expected_version)
        fitted = self._fit.read(adapter, strict=strict)
        entry = Entry(name, next(self._versions), None, fitted.coverage.nbytes, claim=claim)
        loaded = self._levels.device.load(fitted, None)  # refuses what is on another device
        entry.content_hash = content_hash(fitted)
        return self._come(entry, lambda: loaded)

    @checked
    def blend(
        self, name: str, parts: Parts, *, replace: bool = False, at_once: bool = False
    ) -> Coverage:
        """Let a name mean a weighted sum of adapters, which is made when it is wanted.

        Exact but for one rounding of each scaled B to the engine's dtype: ranks add up. It has
        memory of its own, and is gone when a part is unloaded or replaced.

        Args:
            name: what the sum is called from then on.
            parts: adapter -> strength: `{"a": 0.7, "b": 0.3}`; or by prefixes of module paths, as
                in `{"a": {"down_blocks": 0.9, "up_blocks.0": 0.6}}`: the longest that a site has
                counts, "" is the rest, and where there is none it is 1.
            replace: as `load`; a blend of the same versions without leases is rewritten in place.
            at_once: make it now, so that values beyond the engine's dtype are refused now.

        Raises:
            UnknownAdapterError: no adapter has the name of a part.
            AdapterError: the name is taken, is no name or that of a part; a strength is none, or of
                a prefix that no site has; or a site's ranks exceed the engine's together.
        """
        claim = self._claim(name, replace)
        with self._lock:
            source, version = self._names.blend(name, parts), next(self._versions)
        if replace and (coverage := self._rewriter.rewrite(name, source, version)):
            return coverage
        coverage = source.preview()
        entry = Entry(name, version, source, coverage.nbytes, source.entries, claim)
        return self._come(entry) if at_once else self._publish(entry, coverage)

    @checked
    def unload(self, name: str, *, expected_version: int | None = None, wait_s: float = 0.0) -> int:
        """Forget an adapter, and what was made of it; return how many bytes that made free.

        Leases keep it; waits at most `wait_s` seconds for their end. A pin ends.

        Raises:
            UnknownAdapterError, StateError: no adapter has that name; it means another version.
        """
        with self._lock:
            return self._levels.unload(self._names.get(name, expected_version), wait_s)

    @checked
    def lease(self, name: str, *, expected_version: int | None = None) -> Lease:
        """Keep an adapter loaded, and in its slot once it has one, until `release`.

        It is read from disk if it is only there; `prefetch` does that in the background.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: the name means another version, others hold all slots, or memory has no
                room.
            AdapterError: its files are needed, and are gone, damaged or changed.
        """
        with self._lock:
            lease = self._levels.lease(self._names.get(name, expected_version))
        try:
            self._levels.to_memory(lease.entry)
        except BaseException:
            self.release(lease)
            raise
        return lease

    @checked
    def exchange(self, lease: Lease | None, name: str) -> Lease:
        """Lease an adapter instead of another one, whose lease is given back if all goes well.

        Raises:
            UnknownAdapterError, StateError, AdapterError: as `lease` and `release`.
        """
        with self._lock:
            entry = self._names.get(name)
            if entry.is_loaded:
                return self._levels.exchange(lease, entry)
        with self._levels.moving(lambda: self._names.get(name)) as entry:
            self._levels.to_memory(entry)
            with self._lock:
                return self._levels.exchange(lease, entry)

    @checked
    def release(self, lease: Lease) -> None:
        """Give back a lease.

        Raises:
            StateError: it was given back already.
        """
        with self._lock:
            self._levels.release(lease)
        self._levels.notify()

    @checked
    def can_lease(self, name: str) -> bool:
        """Whether a lease finds the adapter in memory, and room for it in the slots.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            entry = self._names.get(name)
            return entry.is_loaded and self._levels.can_hold(entry, self._levels.held)

    @checked
    def pin(self, name: str, *, allow_last: bool = False) -> None:
        """Keep an adapter in a slot, or in memory, until `unpin` or `unload`.

        Args:
            name: of the adapter.
            allow_last: take the last slot that is not pinned, too: no other adapter can be used.

        Raises:
            UnknownAdapterError, AdapterError, StateError: as `lease`; or it is the last slot.
        """
        with self._lock:
            entry = self._names.get(name)
            others, slots = self.pinned - {entry.name}, self.bindings.slot_count
            if not allow_last and slots == len(others) + 1:
                raise StateError(
                    f"adapter {name!r} would be pinned in the last of {slots} slots, and no other "
                    f"adapter could be used; pinned are {sorted(others)}; unpin one first"
                )
            self._levels.pin(entry)
        try:
            self._levels.to_device(entry)
        except BaseException:
            with self._lock:
                self._levels.unpin(entry)
            raise

    @checked
    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            self._levels.unpin(self._names.get(name))
        self._levels.notify()

    @checked
    def prefetch(self, name: str) -> Future[None]:
        """Bring an adapter into memory in the background, and into a slot that is not held.

        Returns:
            What is done when it is there; it holds the error if it cannot be read or finds no room
            in memory. That all slots are held is none.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
        """
        with self._lock:
            return self._prefetcher.submit(self._names.get(name))

    def check_integrity(self) -> None:
        """Check that bytes, slots and leases add up, whatever other threads are about.

        Raises:
            StateError: they do not.
        """
        with self._lock:
            check_integrity(self._levels)

    def _claim(self, name: str, replace: bool = False, expected: int | None = None) -> Claim:
        """Return the terms of a new entry's name; refuse one that it cannot have."""
        claim = Claim(replace, expected)
        with self._lock:
            self._names.check_new(name, claim)
        return claim

    def _come(self, entry: Entry, load: Callable[[], Loaded] | None = None) -> Coverage:
        """Bring a new entry into memory; where it takes over a pin, into its slot."""
        with self._levels.moving(lambda: entry):
            coverage = self._levels.to_memory(entry, load).fitted.coverage
            if entry.is_pinned:
                self._levels.to_device(entry)
        log_warnings(coverage.source, coverage.warnings)
        return coverage

    def _publish(self, entry: Entry, coverage: Coverage) -> Coverage:
        """Give a new entry its name; it comes into memory when it is wanted."""
        with self._lock:
            self._levels.publish(entry)
        log_warnings(coverage.source, coverage.warnings)
        return coverage
