"""Counts of an adapter cache."""

from dataclasses import dataclass


@dataclass
class CacheCounts:
    """What has happened so far."""

    hits: int = 0
    host_hits: int = 0
    disk_loads: int = 0
    evictions_from_host: int = 0
    evictions_from_slots: int = 0
    activation_seconds: float = 0.0


@dataclass(frozen=True)
class CacheStats:
    """What is where now, and what has happened since the cache was made."""

    registered: int
    on_host: int
    in_slots: int
    slots: int
    leased: int
    pinned: int
    host_bytes: int
    host_limit: int | None  # bytes; None: no limit
    slot_bytes: int  # of each slot on the device
    hits: int  # activations that found the adapter in its slot
    host_hits: int  # activations that copied it from the host
    disk_loads: int  # reads of an adapter's files
    evictions_from_host: int
    evictions_from_slots: int
    activation_seconds: float  # of all copies into slots
