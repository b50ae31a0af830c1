"""An adapter store with slots whose loads end when a test says so."""

import threading
from collections import Counter
from concurrent.futures import Future

from trt_lora.plugins.errors import StateError, UnknownAdapterError
from trt_lora.runtime.store.entry import Entry, Lease
from trt_lora.runtime.store.stats import AdapterInfo
from trt_lora.runtime.store.step_bindings import StepBindings
from trt_lora.runtime.store.store import AdapterStore


class _Bindings(StepBindings):
    """What an admission policy asks of `AdapterStore.bindings`."""

    def __init__(self, store: "FakeAdapterStore") -> None:
        self._store = store

    @property
    def slot_count(self) -> int:
        return self._store.count

    @property
    def slots(self) -> dict[str, int]:
        places, versions = self._store.places, self._store.versions
        return {name: slot for (name, v), slot in places.items() if versions.get(name) == v}

    @property
    def resident(self) -> set[str]:
        return set(self.slots)

    def watch(self, event: threading.Event) -> None:
        """Tests make steps by themselves."""


class FakeAdapterStore(AdapterStore):
    """Names and numbers alone; it notices leases beyond its slots, or given back twice."""

    def __init__(self, names: str | list[str], slots: int, *, is_instant: bool = False) -> None:
        self.versions = dict.fromkeys(names, 1)
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
        self.bindings = _Bindings(self)

    @property
    def pinned(self) -> set[str]:
        return {name for name, _ in self.pins}

    @property
    def held(self) -> set[tuple[str, int]]:
        return {(lease.name, lease.version) for lease in self.leases} | self.pins

    def info(self, name: str) -> AdapterInfo:
        if name not in self.versions:
            raise UnknownAdapterError(f"unknown adapter {name!r}")
        is_loaded, is_resident = name in self.host, name in self.bindings.slots
        return AdapterInfo(name, self.versions[name], "", 0, is_loaded, is_resident, False, 0)

    def can_lease(self, name: str) -> bool:
        self.asked += 1
        entry = (name, self.info(name).version)
        return name in self.host and (entry in self.held or len(self.held) < self.count)

    def prefetch(self, name: str) -> Future[None]:
        self.info(name)
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
            if name in self.versions:
                self.loads[name] += name not in self.host
                self.host.add(name)
                self._place((name, self.versions[name]))
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
        version = self.info(name).version
        if expected_version not in (None, version):
            raise StateError(f"{name!r} is version {version}, not {expected_version}")
        assert name in self.host, "a step would wait for the disk"
        if (name, version) not in self.held and len(self.held) == self.count:
            raise StateError(f"all {self.count} slots are held")
        lease = Lease(Entry(name, version, None, 0))
        self.leases.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        if lease not in self.leases:
            raise StateError("released already")
        self.leases.remove(lease)

    def check_integrity(self) -> None:
        assert len(self.held) <= self.count
        assert len(set(self.places.values())) == len(self.places)
