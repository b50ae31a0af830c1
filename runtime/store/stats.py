"""What a store says of an adapter, and of all of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterInfo:
    """What is known of an adapter at a moment."""

    name: str
    version: int  # that the name means: a number that nothing else under it has
    # SHA-256 of the weights as the engine takes them, of a blend of its parts' and their strengths;
    # empty until they are read.
    content_hash: str
    nbytes: int  # in memory
    is_loaded: bool  # in memory
    is_resident: bool  # where a step can bind it at once
    is_pinned: bool
    leases: int


@dataclass
class StoreCounts:
    """What has happened so far."""

    hits: int = 0
    copies: int = 0
    reads: int = 0
    evictions_from_memory: int = 0
    evictions_from_slots: int = 0
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class StoreStats:
    """What is where now, and what has happened since the store was made."""

    registered: int
    in_memory: int
    in_slots: int
    slots: int  # 0: an engine for one adapter at a time
    leased: int
    pinned: int
    memory_bytes: int  # on the host beside slots, else on the engine's device
    memory_limit: int | None  # bytes; None: no limit
    slot_bytes: int  # of each slot on the device
    hits: int  # uses that found the adapter where a step can bind it
    copies: int  # from the host into a slot
    reads: int  # of an adapter's files, or of what it is made of
    evictions_from_memory: int
    evictions_from_slots: int
    copy_seconds: float  # of all copies into slots
