"""Adapters of a scheduler: one for all of its sequences, or one for each."""

import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import NoReturn, Protocol

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.runtime.memory.tensor import TensorMap
from trt_lora.runtime.serving.adapter_cache import AdapterCache


class StepAdapters(Protocol):
    """Who holds the adapters, and what a step takes of them."""

    @property
    def cache(self) -> AdapterCache:
        """Where sequences find the adapters that they name."""
        ...

    def bindings(self) -> TensorMap:
        """Return the engine's LoRA inputs, for all sequences until they name others.

        Raises:
            ConfigError: sequences do name others.
        """
        ...

    def described(self, names: Sequence[str | None]) -> str:
        """Return what a message says of the adapters of some sequences."""
        ...


class SharedAdapter:
    """`StepAdapters` of a manager: its active adapter."""

    def __init__(self, engine: Executor, manager: LoRAManager | None) -> None:
        """None: the base model."""
        self._manager = manager or LoRAManager()
        if manager is None:
            self._manager.initialize_engine_bindings(engine)
        self._described = ""

    @property
    def cache(self) -> AdapterCache:
        """Nothing that could be named."""
        return _NoAdapters()

    def bindings(self) -> TensorMap:
        """Return what is active now."""
        tensor_map = TensorMap()
        self._manager.refresh_tensor_map(tensor_map)
        name, scale = self._manager.get_active_adapter_name(), self._manager.active_scale
        self._described = f"adapter {name!r} at strength {scale:g}" if name else "no adapter"
        return tensor_map

    def described(self, names: Sequence[str | None]) -> str:
        """Return the adapter of the bindings in use."""
        del names
        return self._described


class OwnAdapters:
    """`StepAdapters` of an engine with slots: each sequence has its own."""

    def __init__(self, adapters: AdapterStore) -> None:
        """Take them."""
        self._adapters, self._is_bound = adapters, False

    @property
    def cache(self) -> AdapterCache:
        """The adapters."""
        return self._adapters

    def bindings(self) -> TensorMap:
        """Return those of the base model, once."""
        if self._is_bound:
            raise ConfigError("requests have adapters of their own; see `submit`")
        self._is_bound = True
        return self._adapters.rows([None])

    def described(self, names: Sequence[str | None]) -> str:
        """Return the names of the adapters."""
        own = dict.fromkeys(f"adapter {name!r}" if name else "no adapter" for name in names)
        return ", ".join(own)


class _NoAdapters:
    """`AdapterCache` where all sequences have one adapter."""

    slots: Mapping[str, int] = {}
    slot_count = 0
    pinned: AbstractSet[str] = frozenset()

    def generation(self, name: str) -> int:
        _refuse(name)

    def is_on_host(self, name: str) -> bool:
        _refuse(name)

    def can_lease(self, name: str) -> bool:
        _refuse(name)

    def prefetch(self, name: str) -> Future[None]:
        _refuse(name)

    def lease(self, name: str, *, expected_version: int | None = None) -> Lease:
        del expected_version
        _refuse(name)

    def release(self, lease: Lease) -> None:
        _refuse(lease.name)

    def watch(self, event: threading.Event) -> None:
        """Nothing comes or goes."""

    def check_integrity(self) -> None:
        """There is nothing to check."""


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"adapter is {name!r}, but all requests of this scheduler have one adapter; pass "
        "adapters=AdapterStore(engine) to it, or switch its manager"
    )


def step_adapters(
    engine: Executor, manager: LoRAManager | None, adapters: AdapterStore | None
) -> StepAdapters:
    """Return the adapters of a scheduler.

    Raises:
        ConfigError: both are given.
    """
    if adapters is None:
        return SharedAdapter(engine, manager)
    if manager is not None:
        raise ConfigError("manager and adapters both say which adapter answers; pass one of them")
    return OwnAdapters(adapters)
