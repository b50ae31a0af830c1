"""AdapterDesk: what is asked of an engine's adapters over HTTP, in values that MessagePack has."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from trt_lora.plugins.errors import AdapterError, UnknownAdapterError
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.store.names import strength_name
from trt_lora.runtime.store.store import AdapterStore

_LEVELS = ("disk", "memory", "slot")
_KEPT_BLENDS = 16  # that requests have made; another one takes the place of the oldest


class _Loaded(NamedTuple):
    """How an adapter was loaded."""

    version: int
    coverage: Coverage
    milliseconds: float


class AdapterDesk:
    """Loads, unloads, pins and lists adapters, and blends them for requests; any thread may ask."""

    def __init__(self, adapters: AdapterStore) -> None:
        """Take the engine's adapters."""
        self._adapters, self._lock = adapters, threading.Lock()
        self._blends: dict[str, None] = {}  # the oldest first
        self._loaded: dict[str, _Loaded] = {}  # by name
        self._answers: Mapping[str, Callable[..., Any]] = {
            "load": self._load,
            "unload": self._unload,
            "pin": self._pin,
            "unpin": self._unpin,
            "adapter": self._adapter,
            "adapters": self._list,
            "stats": self._stats,
        }

    def answer(self, what: str, options: Mapping[str, Any]) -> Any:
        """Return the answer to a question.

        Raises:
            LoRAError: as the method of `AdapterStore` that it is.
        """
        return self._answers[what](**options)

    def blended(self, parts: Mapping[str, float]) -> str:
        """Return the name of a weighted sum of adapters, made for requests.

        It has a comma, which no name has that was given over HTTP. The oldest goes when there are
        too many: requests that run keep it, one that waits for a slot ends with an error.

        Raises:
            UnknownAdapterError, AdapterError: as `AdapterStore.blend`.
        """
        if len(parts) == 1:
            ((name, weight),) = parts.items()
            return strength_name(name, weight)
        blend = f"({','.join(f'{name}@{weight!r}' for name, weight in sorted(parts.items()))})"
        with self._lock:
            self._blends.pop(blend, None)
            if blend not in self._adapters.names:
                self._adapters.blend(blend, parts)
            self._blends[blend] = None
            while len(self._blends) > _KEPT_BLENDS:
                self._forget(next(iter(self._blends)))
        return blend

    def _forget(self, blend: str) -> None:
        del self._blends[blend]
        if blend in self._adapters.names:
            self._adapters.unload(blend)

    def _load(
        self,
        name: str,
        path: str,
        max_rank: int,
        replace: bool = False,
        expected_version: int | None = None,
        lazily: bool = False,
    ) -> dict[str, Any]:
        start = time.perf_counter()
        manifest = self._adapters.manifest
        if max_rank < manifest.max_lora_rank:
            rank = max(load_adapter(path, manifest).ranks.values(), default=0)
            if rank > max_rank:
                raise AdapterError(f"{path} has rank {rank}, --max-lora-rank is {max_rank}")
        if lazily:  # its values are read when a request's turn has come
            coverage = self._adapters.register(name, path, replace=replace)
        else:
            coverage = self._adapters.load(
                name, path, replace=replace, expected_version=expected_version
            )
        taken = round(1000 * (time.perf_counter() - start), 3)
        self._loaded[name] = _Loaded(self._adapters.info(name).version, coverage, taken)
        return self._adapter(name)

    def _unload(self, name: str, wait_s: float) -> int:
        self._loaded.pop(name, None)
        return self._adapters.unload(name, wait_s=wait_s)

    def _pin(self, name: str) -> dict[str, Any]:
        self._adapters.pin(name)
        return self._adapter(name)

    def _unpin(self, name: str) -> dict[str, Any]:
        self._adapters.unpin(name)
        return self._adapter(name)

    def _list(self) -> list[dict[str, Any]]:
        found = []
        for name in self._adapters.names:
            if name in self._blends:
                continue
            try:
                found.append(self._adapter(name))
            except UnknownAdapterError:  # unloaded by another thread
                continue
        return found

    def _adapter(self, name: str) -> dict[str, Any]:
        info = self._adapters.info(name)
        loaded = self._loaded.get(name)
        if loaded is not None and loaded.version != info.version:
            loaded = None  # another thread has just loaded the next one
        sites, warnings = (loaded.coverage.sites, loaded.coverage.warnings) if loaded else ((), ())
        slot = self._adapters.bindings.slots.get(name)
        level = _LEVELS[(slot is not None) + info.is_loaded]
        return {
            "name": name,
            "version": info.version,
            "sha256": info.content_hash,
            "rank": max((site.rank for site in sites), default=0),
            "bytes": info.nbytes,
            "level": level,
            "slot": slot,
            "leases": info.leases,
            "pinned": info.is_pinned,
            "milliseconds": loaded.milliseconds if loaded else 0.0,
            "warnings": list(warnings),
        }

    def _stats(self) -> dict[str, Any]:
        """What was loaded under a name, by level; what requests blend comes and goes."""
        adapters, stats = self._adapters, self._adapters.stats
        loaded = [name for name in adapters.names if name not in self._blends]
        in_slots, in_memory = adapters.bindings.slots, adapters.bindings.loaded
        levels = Counter(_LEVELS[(name in in_slots) + (name in in_memory)] for name in loaded)
        return {
            "slots": stats.slots,
            "resident": self._versions(sorted(adapters.bindings.resident & set(loaded))),
            "levels": {level: levels[level] for level in _LEVELS},
            "loads": {"memory": stats.reads, "slot": stats.copies},
        }

    def _versions(self, names: Iterable[str]) -> dict[str, tuple[int, str]]:
        """The number and the SHA-256 of what each name means."""
        found = {}
        for name in names:
            with suppress(UnknownAdapterError):  # unloaded by another thread
                info = self._adapters.info(name)
                found[name] = info.version, info.content_hash
        return found
