"""Entry: one version of an adapter in the store. Lease: the promise that it stays."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from trt_lora.plugins.errors import ChangedAdapterError
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import TensorMap
from trt_lora.runtime.store.source import Source
from trt_lora.runtime.store.stats import AdapterInfo


@dataclass(frozen=True, eq=False)
class Loaded:
    """An adapter in memory, as the engine takes it."""

    fitted: Fitted  # on the host; without slots, in the engine's own memory
    bindings: TensorMap | None = None  # every LoRA input of an engine without slots
    _b: dict[str, Array] = field(default_factory=dict, repr=False)

    def b_on_host(self, manifest: Manifest) -> Mapping[str, Array]:
        """Return B [r, n], or [E, r, n], of its sites by path: in place, or copies from a GPU.

        They are found once: looking up hundreds of them takes as long as scaling their values.
        """
        if not self._b:
            sites = {name: manifest.lora_bindings[name] for name in self.fitted.tensors}
            self._b.update(
                (site.path, self.fitted.tensors[name].read_storage())
                for name, (site, factor) in sites.items()
                if factor == "B"
            )
        return self._b


@dataclass(frozen=True)
class Claim:
    """On which terms an entry takes its name."""

    replace: bool = False  # it may be another's
    expected_version: int | None = None  # that it means until then; 0 is none


@dataclass(eq=False)
class Entry:
    """What the store knows of a version of an adapter; written under the store's lock alone.

    A level is a future: None where the adapter is not there, pending while it is on its way.
    """

    name: str
    version: int  # no two entries of a name have one
    source: Source | None  # None: its weights came in memory, and cannot be read again
    nbytes: int  # in memory
    parts: tuple["Entry", ...] = ()  # what it was made of; it is gone with any of them
    claim: Claim | None = None  # until it has its name
    content_hash: str = ""  # until it was read for the first time
    in_memory: Future[Loaded] | None = None
    loaded: Loaded | None = None  # what `in_memory` has, without waiting for it
    in_slot: Future[int] | None = None
    leases: int = 0
    is_pinned: bool = False
    is_named: bool = False  # not yet, or no more: then it lives as long as it is held
    moving: int = 0  # threads that read or copy it at this moment

    @property
    def is_loaded(self) -> bool:
        """Whether it is in memory."""
        return self.loaded is not None

    def leave_memory(self) -> None:
        """Forget what was there."""
        self.in_memory = self.loaded = None

    @property
    def is_held(self) -> bool:
        """Whether it is leased or pinned."""
        return bool(self.leases or self.is_pinned)

    @property
    def is_evictable(self) -> bool:
        """Whether it can leave memory."""
        return not self.is_held and not self.moving

    @property
    def is_evictable_from_slot(self) -> bool:
        """Whether its slot can be another's: it is not held, and is not just copied there.

        What waits for a turn to be moved may be in memory alone: if that kept the slot, the one
        whose turn it is would wait for those behind it.
        """
        return not self.is_held and self.in_slot is not None and self.in_slot.done()

    def info(self, *, is_resident: bool) -> AdapterInfo:
        """Return what is known of it now."""
        return AdapterInfo(
            self.name,
            self.version,
            self.content_hash,
            self.nbytes,
            self.is_loaded,
            is_resident,
            self.is_pinned,
            self.leases,
        )

    def describe(self) -> str:
        """Return its name and what holds it."""
        sequences = f"{self.leases} sequence{'s' if self.leases > 1 else ''}"
        holders = [sequences] if self.leases else []
        holders += ["pinned"] if self.is_pinned else []
        holders += ["being copied"] if self.moving and not holders else []
        old = "" if self.is_named else f", version {self.version}"
        return f"{self.name!r}{old} ({', '.join(holders) or 'idle'})"


@dataclass(frozen=True, eq=False)
class Lease:
    """The promise that one version of an adapter stays loaded, and in its slot once it has one.

    Whatever is kept for an adapter, such as a KV cache, is kept under `key`.
    """

    entry: Entry = field(repr=False)  # the store's own

    @property
    def name(self) -> str:
        """What the adapter was called when it was leased."""
        return self.entry.name

    @property
    def version(self) -> int:
        """The version that the name meant then."""
        return self.entry.version

    @property
    def content_hash(self) -> str:
        """SHA-256 of the weights as the engine takes them; see `AdapterInfo`."""
        return self.entry.content_hash

    @property
    def loaded(self) -> Loaded:
        """The adapter in memory, where it stays."""
        assert self.entry.loaded is not None  # a lease has waited for it
        return self.entry.loaded

    @property
    def key(self) -> tuple[str, int]:
        """Hash and version: no two adapters have it in common."""
        return self.content_hash, self.version


def check_unchanged(entry: Entry, fitted: Fitted, digest: str) -> None:
    """Refuse files that hold another adapter than they did when they were last looked at.

    Raises:
        ChangedAdapterError: they do.
    """
    if entry.parts:
        return  # made of versions that do not change
    if fitted.coverage.nbytes != entry.nbytes or entry.content_hash not in ("", digest):
        raise ChangedAdapterError(
            f"{fitted.coverage.source} changed since it was loaded as adapter {entry.name!r}, "
            f"version {entry.version}; load it again with replace=True"
        )
