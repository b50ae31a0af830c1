"""Adapters of a batch: one for all of its sequences, or one for each."""

from collections.abc import Sequence
from typing import Protocol

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.manifest import STATIC, Manifest
from trt_lora.runtime.memory.tensor import TensorMap


class BatchAdapters(Protocol):
    """Who holds the adapters, and what sequences take of them."""

    def bindings(self) -> TensorMap:
        """Return the engine's LoRA inputs, for all sequences until they name others.

        Raises:
            ConfigError: sequences do name others.
        """
        ...

    def lease(self, adapter: Lease | str | None) -> Lease | None:
        """Take an adapter for a sequence; None is the base model, or what all have.

        A lease is taken as it is, and belongs to the sequence from then on.

        Raises:
            ConfigError: all sequences have one adapter.
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: no slot is free.
            AdapterError: the adapter was to be read again, and could not.
        """
        ...

    def release(self, lease: Lease | None) -> None:
        """Give back what a sequence has taken."""
        ...

    def described(self, names: Sequence[str | None]) -> str:
        """Return what a message says of the adapters of some sequences."""
        ...


class SharedAdapter:
    """`BatchAdapters` of a manager: its active adapter."""

    def __init__(self, engine: Executor, manager: LoRAManager | None) -> None:
        """None: the base model."""
        self._manager = manager or LoRAManager()
        if manager is None:
            self._manager.initialize_engine_bindings(engine)
        self._described = ""

    def bindings(self) -> TensorMap:
        """Return what is active now."""
        tensor_map = TensorMap()
        self._manager.refresh_tensor_map(tensor_map)
        name, scale = self._manager.get_active_adapter_name(), self._manager.active_scale
        self._described = f"adapter {name!r} at strength {scale:g}" if name else "no adapter"
        return tensor_map

    def lease(self, adapter: Lease | str | None) -> Lease | None:
        """Refuse a name."""
        if adapter is not None:
            raise ConfigError(
                f"adapter is {adapter!r}, but all sequences of this batch have one adapter; pass "
                "adapters=SlotAdapters(engine) to the batch, or switch its manager"
            )
        return None

    def release(self, lease: Lease | None) -> None:
        """Nothing was taken."""

    def described(self, names: Sequence[str | None]) -> str:
        """Return the adapter of the bindings in use."""
        del names
        return self._described


class OwnAdapters:
    """`BatchAdapters` of an engine with slots: each sequence has its own."""

    def __init__(self, adapters: SlotAdapters, manifest: Manifest) -> None:
        """Take them.

        Raises:
            ConfigError: the engine's cache grows.
        """
        if manifest.kv_cache != STATIC:
            raise ConfigError(
                "adapters of their own are for sequences in a static cache, and this engine's "
                "grows; build with --kv-cache static"
            )
        self._adapters, self._is_bound = adapters, False

    def bindings(self) -> TensorMap:
        """Return those of the base model, once."""
        if self._is_bound:
            raise ConfigError("sequences of this batch have adapters of their own; see `add`")
        self._is_bound = True
        return self._adapters.rows([None])

    def lease(self, adapter: Lease | str | None) -> Lease | None:
        """Keep the adapter loaded, and in its slot."""
        if not isinstance(adapter, Lease | str | None):
            raise ConfigError(
                f"adapter is {shown(adapter)}, expected its name, a lease of it, or None for the "
                "base model"
            )
        return self._adapters.lease(adapter) if isinstance(adapter, str) else adapter

    def release(self, lease: Lease | None) -> None:
        """Let it go."""
        if lease is not None:
            self._adapters.release(lease)

    def described(self, names: Sequence[str | None]) -> str:
        """Return the names of the adapters."""
        own = dict.fromkeys(f"adapter {name!r}" if name else "no adapter" for name in names)
        return ", ".join(own)


def batch_adapters(
    engine: Executor, manager: LoRAManager | None, adapters: SlotAdapters | None
) -> BatchAdapters:
    """Return the adapters of a batch.

    Raises:
        ConfigError: both are given, or the engine's cache grows.
    """
    if adapters is None:
        return SharedAdapter(engine, manager)
    if manager is not None:
        raise ConfigError("manager and adapters both say which adapter answers; pass one of them")
    return OwnAdapters(adapters, engine.manifest)
