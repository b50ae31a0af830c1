"""Names of adapters: the generation that each one means now."""

from collections import OrderedDict

from trt_lora.plugins.errors import (
    AdapterError,
    EvictedAdapterError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.plugins.messages import listed, shown
from trt_lora.runtime.managers.arguments import check_new_name
from trt_lora.runtime.managers.slots.cache.entry import Entry

_REMEMBERED = 10_000  # names that were evicted and cannot be read again


class Names:
    """From names to entries; its caller holds the cache's lock."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._evicted: OrderedDict[str, None] = OrderedDict()  # the oldest first

    def get(self, name: str, expected_generation: int | None = None) -> Entry:
        """Return the entry of a name.

        Raises:
            UnknownAdapterError: there is none; EvictedAdapterError: there was one.
            StateError: it has another generation than expected.
        """
        if name in self._evicted:
            raise evicted(name)
        if name not in self.entries:
            raise UnknownAdapterError(
                f"unknown adapter {shown(name)}; loaded: {listed(list(self.entries)) or 'none'}"
            )
        entry = self.entries[name]
        _check_generation(name, entry.generation, expected_generation)
        return entry

    def check_new(self, name: str, *, replace: bool, expected_generation: int | None) -> None:
        """Refuse a name that a new adapter cannot have.

        Raises:
            AdapterError: it is no name, or is taken and nothing says that it may be replaced.
            StateError: it means another generation than expected; 0 is none.
        """
        check_new_name(name)
        entry = self.entries.get(name)
        _check_generation(name, entry.generation if entry else 0, expected_generation)
        if entry and not replace and expected_generation is None:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; unload it first, or pass "
                "replace=True"
            )

    def set(self, entry: Entry) -> None:
        """Let a name mean an entry from now on."""
        self._evicted.pop(entry.name, None)
        self.entries[entry.name] = entry

    def forget(self, entry: Entry) -> None:
        """Remember only that there was such an adapter; one without a name is never evicted."""
        del self.entries[entry.name]
        self._evicted[entry.name] = None
        if len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)


def evicted(name: str) -> EvictedAdapterError:
    """Return the error of an adapter that cannot be read again."""
    return EvictedAdapterError(
        f"adapter {name!r} was evicted, and its weights came in memory; send them again"
    )


def _check_generation(name: str, generation: int, expected: int | None) -> None:
    if expected is not None and expected != generation:
        raise StateError(
            f"adapter {name!r} is at generation {generation}, expected {expected}: somebody "
            "replaced or unloaded it; look at `generation` again"
        )
