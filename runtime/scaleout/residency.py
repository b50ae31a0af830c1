"""Which replica a request goes to: the one that has its adapter in a slot."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass(frozen=True)
class Wish:
    """What a request asks of a router."""

    adapters: tuple[str, ...] = ()  # to be in slots; none for the base model
    replica: str = ""  # the only one that will do


Version = tuple[int, str]  # of an adapter: its number, and the SHA-256 of what it holds


@dataclass(frozen=True)
class Residency:
    """What a replica says of itself."""

    slots: int = 0  # 0: its engine has none, and every adapter in memory is at hand
    resident: Mapping[str, Version] = field(default_factory=dict)
    wanted: Sequence[str] = ()  # adapters that requests wait for
    queue: int = 0  # requests that have not ended
    rows: int = 0  # requests that run at a time, most; 0: not known

    @property
    def is_full(self) -> bool:
        """Whether a request waits here until another one ends."""
        return 0 < self.rows <= self.queue


def ranked(
    replicas: Mapping[str, Residency], adapters: Sequence[str], spill_after: int
) -> list[str]:
    """Return the replicas' names, the best first.

    A replica that has the adapters in slots comes before one that has slots free, and both with a
    row free before both without, since a row is free when an answer ends, and a slot that is free
    filled in milliseconds. Behind them come the rest, which would lose another adapter. Among
    equals each adapter has a home, by rendezvous hashing (Thaler and Ravishankar, 1998). The base
    model's requests go to the shortest queue.

    Args:
        replicas: what each says, by name.
        adapters: of the request; none for the base model.
        spill_after: a replica whose queue is longer than the shortest by so many comes last.
    """
    if not adapters:
        return sorted(replicas, key=lambda name: (replicas[name].queue, random.random()))
    shortest = min(replica.queue for replica in replicas.values())
    newest = {adapter: max(_versions(replicas, adapter), default=None) for adapter in adapters}

    def order(name: str) -> tuple[bool, int, bool, bytes]:
        replica = replicas[name]
        # Versions are counted from each replica's start: equal contents may have several.
        is_old = any((replica.resident.get(a) or n)[1] != n[1] for a, n in newest.items() if n)
        is_long = replica.queue > shortest + spill_after
        return is_long, _rank(replica, adapters), is_old, _weight(name, adapters)

    return sorted(replicas, key=order)


def differing(replicas: Mapping[str, Residency]) -> list[str]:
    """Return the adapters whose contents are not the same wherever they are in slots."""
    names = {name for replica in replicas.values() for name in replica.resident}
    return sorted(n for n in names if len({content for _, content in _versions(replicas, n)}) > 1)


def _rank(replica: Residency, adapters: Sequence[str]) -> int:
    missing = [adapter for adapter in adapters if adapter not in replica.resident]
    taken = {*replica.resident, *replica.wanted, *missing}
    if missing and replica.slots and len(taken) > replica.slots:
        return 4  # behind both of those below, full or not
    return 2 * replica.is_full + bool(missing)


def _versions(replicas: Mapping[str, Residency], adapter: str) -> list[Version]:
    return [r.resident[adapter] for r in replicas.values() if adapter in r.resident]


def _weight(replica: str, adapters: Sequence[str]) -> bytes:
    return blake2b("\0".join([replica, *adapters]).encode(), digest_size=8).digest()
