"""One generation of an adapter in the cache, and leases of it."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.managers.slots.cache.adapter_source import AdapterSource, host_nbytes


@dataclass(eq=False)
class Entry:
    """What the cache knows of an adapter; written under the cache's lock alone.

    A level is a future: None where the adapter is not there, pending while it is on its way.
    """

    name: str
    generation: int  # no two entries of a cache have one
    source: AdapterSource | None  # None: weights in memory, which cannot be read again
    nbytes: int  # on the host
    content_hash: str = ""  # until it was read for the first time
    fingerprint: str = ""  # of its files when it was registered; empty where they were read then
    on_host: Future[Fitted] | None = None
    in_slot: Future[int] | None = None
    leases: int = 0
    is_pinned: bool = False
    is_named: bool = False  # not yet, or no more: then it lives as long as somebody has it
    moving: int = 0  # threads that read or copy it at this moment

    @property
    def is_read(self) -> bool:
        """Whether it is in host memory."""
        return self.on_host is not None and self.on_host.done()

    @property
    def is_held(self) -> bool:
        """Whether somebody counts on it."""
        return bool(self.leases or self.is_pinned)

    @property
    def may_leave(self) -> bool:
        """Whether it can be evicted."""
        return not self.is_held and not self.moving

    @property
    def may_leave_slot(self) -> bool:
        """Whether its slot can be another's: nobody counts on it, and it is not just copied there.

        Who waits for a turn to move it may find it on the host alone: if that kept the slot, whose
        turn it is would wait for those behind it.
        """
        return not self.is_held and self.in_slot is not None and self.in_slot.done()

    def described(self) -> str:
        """Return its name and who holds it."""
        sequences = f"{self.leases} sequence{'s' if self.leases > 1 else ''}"
        holders = [sequences] if self.leases else []
        holders += ["pinned"] if self.is_pinned else []
        holders += ["being copied"] if self.moving and not holders else []
        old = "" if self.is_named else f", generation {self.generation}"
        return f"{self.name!r}{old} ({', '.join(holders) or 'idle'})"


@dataclass(frozen=True, eq=False)
class Lease:
    """The promise that one generation of an adapter stays loaded, and in its slot once it has one.

    Whatever is kept for an adapter, such as a KV cache, is kept under `key`.
    """

    entry: Entry = field(repr=False)  # the cache's own

    @property
    def name(self) -> str:
        """What the adapter was called when it was leased."""
        return self.entry.name

    @property
    def generation(self) -> int:
        """The generation that the name meant then."""
        return self.entry.generation

    @property
    def content_hash(self) -> str:
        """SHA-256 of the weights as the engine takes them."""
        return self.entry.content_hash

    @property
    def key(self) -> tuple[str, int]:
        """Hash and generation: no two adapters have it in common."""
        return self.content_hash, self.generation


def check_registered(entry: Entry) -> None:
    """Refuse files that are read for the first time and are others than were registered.

    Raises:
        AdapterError: they are.
    """
    if entry.source is None or entry.content_hash or not entry.fingerprint:
        return
    if entry.source.fingerprint() != entry.fingerprint:
        raise AdapterError(
            f"{entry.source.path} changed since it was registered as adapter {entry.name!r}; load "
            "it with replace=True, or unload it and register it again"
        )


def check_unchanged(entry: Entry, fitted: Fitted, digest: str) -> None:
    """Refuse files that hold another adapter than they did when they were last looked at.

    Raises:
        AdapterError: they do.
    """
    if host_nbytes(fitted.coverage) != entry.nbytes or entry.content_hash not in ("", digest):
        raise AdapterError(
            f"{fitted.coverage.source} changed since it was loaded as adapter {entry.name!r}, "
            f"generation {entry.generation}; load it again with replace=True"
        )
