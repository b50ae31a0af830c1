"""A cache of adapters in two levels whose loads end when a test says so."""

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future

from trt_lora.plugins.errors import StateError, UnknownAdapterError
from trt_lora.runtime.store.entry import Entry, Lease


class FakeAdapterCache:
    """Names and numbers alone; it notices leases beyond its slots, or given back twice."""

    def __init__(self, names: str | list[str], slots: int, *, is_instant: bool = False) -> None:
        self.generations = dict.fromkeys(names, 1)
        self.count = slots
        self.is_instant = is_instant  # loads are done at once
        self.host: set[str] = set()
        self.places: dict[tuple[str, int], int] = {}
        self.leases: set[Lease] = set()
        self.pins: set[tuple[str, int]] = set()
        self.errors: dict[str, Exception] = {}  # of loads
        self.pending: list[tuple[str, Future[None]]] = []
        self.loads = Counter[str]()  # from disk
        self.asked = 0  # how often whether something can be leased

    @property
    def slot_count(self) -> int:
        return self.count

    @property
    def pinned(self) -> set[str]:
        return {name for name, _ in self.pins}

    @property
    def slots(self) -> Mapping[str, int]:
        return {n: slot for (n, g), slot in self.places.items() if self.generations.get(n) == g}

    @property
    def held(self) -> set[tuple[str, int]]:
        return {(lease.name, lease.generation) for lease in self.leases} | self.pins

    def generation(self, name: str) -> int:
        if name not in self.generations:
            raise UnknownAdapterError(f"unknown adapter {name!r}")
        return self.generations[name]

    def is_on_host(self, name: str) -> bool:
        self.generation(name)
        return name in self.host

    def can_lease(self, name: str) -> bool:
        self.asked += 1
        entry = (name, self.generation(name))
        return name in self.host and (entry in self.held or len(self.held) < self.count)

    def prefetch(self, name: str) -> Future[None]:
        self.generation(name)
        future: Future[None] = Future()
        self.pending.append((name, future))
        if self.is_instant:
            self.end_loads()
        return future

    def end_loads(self, *names: str) -> None:
        """Let loads end, all or some."""
        ending = [(n, f) for n, f in self.pending if not names or n in names]
        self.pending = [pair for pair in self.pending if pair not in ending]
        for name, future in ending:
            if name in self.errors and name not in self.host:
                future.set_exception(self.errors[name])
                continue
            if name in self.generations:
                self.loads[name] += name not in self.host
                self.host.add(name)
                self._place((name, self.generations[name]))
            future.set_result(None)

    def _place(self, entry: tuple[str, int]) -> None:
        if entry in self.places:
            return
        free = set(range(self.count)).difference(self.places.values())
        idle = [other for other in self.places if other not in self.held]
        if not free and not idle:
            return
        self.places[entry] = min(free) if free else self.places.pop(idle[0])

    def lease(self, name: str, *, expected_version: int | None = None) -> Lease:
        generation = self.generation(name)
        if expected_version not in (None, generation):
            raise StateError(f"{name!r} is generation {generation}, not {expected_version}")
        assert name in self.host, "a step would wait for the disk"
        if (name, generation) not in self.held and len(self.held) == self.count:
            raise StateError(f"all {self.count} slots are held")
        lease = Lease(Entry(name, generation, None, 0))
        self.leases.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        if lease not in self.leases:
            raise StateError("released already")
        self.leases.remove(lease)

    def watch(self, event: threading.Event) -> None:
        """Tests make steps by themselves."""

    def check_integrity(self) -> None:
        assert len(self.held) <= self.count
        assert len(set(self.places.values())) == len(self.places)
