"""vLLM's `LoRAModelManager`: register, activate and remove adapters by number."""

import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trt_lora.plugins.checked import checked
from trt_lora.plugins.contract.modules import PART_SUFFIXES, parts_of
from trt_lora.plugins.errors import ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.interfaces.vllm.config import LoRAConfig
from trt_lora.runtime.interfaces.vllm.mapping import LoRAMapping
from trt_lora.runtime.interfaces.vllm.metrics import Mean, lora_metrics
from trt_lora.runtime.interfaces.vllm.model import LoRAModel
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import TensorMap


@dataclass(frozen=True)
class _Registered:
    """An adapter under a number, and which generation of its name that is."""

    model: LoRAModel
    generation: int


class LoRAModelManager:
    """Numbers for the adapters of an engine with slots, which hold the weights.

    An active adapter is one that the manager leases: it stays in its slot. One that was evicted,
    unloaded or replaced behind the manager is not registered any more. vLLM's arguments model,
    max_num_seqs, max_num_batched_tokens, vocab_size and device are the engine's. One thread at a
    time may call it.
    """

    @checked
    def __init__(self, lora_config: LoRAConfig, adapters: SlotAdapters, manifest: Manifest) -> None:
        """Take an engine's adapters.

        Args:
            lora_config: see there; `adapters` are made with its `cache_config`.
            adapters: of a running engine.
            manifest: of the same engine.

        Raises:
            ConfigError: an option is not what the adapters have.
        """
        self.lora_config = lora_config.resolved(adapters, manifest)
        self.adapters, self.manifest = adapters, manifest
        self._known: OrderedDict[int, _Registered] = OrderedDict()  # least recently used first
        self._active: OrderedDict[int, Lease] = OrderedDict()  # the same
        self._pinned: set[int] = set()
        self._mapping: LoRAMapping | None = None
        self._switching = Mean()

    @property
    def capacity(self) -> int:
        """Adapters that can be registered."""
        return self.lora_config.max_cpu_loras or 0

    @property
    def lora_slots(self) -> int:
        """Adapters that can be active."""
        return self.adapters.stacks.slots

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The id of the active adapter in every slot."""
        slots, registered = self.adapters.slots, self._registered
        ids = {slots.get(registered[id_].model.adapter_name): id_ for id_ in self._active}
        return [ids.get(slot) for slot in range(self.lora_slots)]

    @property
    def supported_lora_modules(self) -> list[str]:
        """Last parts of the paths that take LoRA."""
        return list(dict.fromkeys(site.path.rpartition(".")[2] for site in self.manifest.sites))

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        """The modules that each fused one is made of, by the last parts of their paths."""
        return {
            site.path.rpartition(".")[2]: [PART_SUFFIXES[name] for name in names]
            for site in self.manifest.sites
            if (names := parts_of(site.path))
        }

    @checked
    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register an adapter; False if its number is registered.

        Raises:
            StateError: (a RuntimeError) `capacity` adapters are registered.
            AdapterError: (a ValueError) the engine cannot take it.
        """
        if adapter.id in self._registered:
            return False
        self._make_room()
        name = adapter.adapter_name
        if adapter.path is None:
            self.adapters.add_adapter(name, adapter.adapter)
        else:  # so that it can be read again once it was evicted
            self.adapters.load_weights(name, adapter.path)
        self._known[adapter.id] = _Registered(adapter, self.adapters.generation(name))
        return True

    @checked
    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter; False if it is not registered."""
        known = self._registered.get(adapter_id)
        if known is None:
            return False
        self._drop(adapter_id)
        with suppress(UnknownAdapterError, StateError):  # another thread was faster
            name = known.model.adapter_name
            self.adapters.unload(name, expected_generation=known.generation)  # its pin ends too
        return True

    def remove_all_adapters(self) -> None:
        """Forget all adapters."""
        for adapter_id in list(self._registered):
            self.remove_adapter(adapter_id)

    @checked
    def activate_adapter(self, lora_id: int) -> bool:
        """Copy an adapter into a slot, where it stays; False if it is active.

        Raises:
            UnknownAdapterError: (a KeyError) it is not registered.
            ConfigError: (a ValueError) all slots are taken by active adapters.
        """
        known = self._get(lora_id)
        if lora_id in self._active:
            return False
        left = self._make_slot() if len(self._active) == self.lora_slots else None
        try:
            self._activate(lora_id, known)
        except BaseException:
            if left is not None:  # one that fails changes nothing
                self._activate(left, self._get(left))
                self._active.move_to_end(left, last=False)
            raise
        return True

    @checked
    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Let an adapter leave its slot when another needs it.

        False if it is not active, or is pinned: that one stays.
        """
        if adapter_id not in self._active or adapter_id in self._pinned:
            return False
        self.adapters.release(self._active.pop(adapter_id))
        return True

    @checked
    def pin_adapter(self, adapter_id: int) -> bool:
        """Activate an adapter and keep it until it is removed; vLLM's LRU manager alone can.

        Raises:
            UnknownAdapterError: (a KeyError) it is not registered.
            ConfigError: (a ValueError) all slots are taken.
        """
        self.activate_adapter(adapter_id)
        if adapter_id not in self._pinned:
            self.adapters.pin(self._get(adapter_id).model.adapter_name, allow_last=True)
            self._pinned.add(adapter_id)
        return True

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Return the registered adapters by number."""
        return {id_: known.model for id_, known in self._registered.items()}

    @checked
    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """Return an adapter; None if it is not registered."""
        return self.list_adapters().get(adapter_id)

    @checked
    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Take the adapter of every row of the next steps.

        Raises:
            UnknownAdapterError: (a KeyError) one is not registered.
        """
        if mapping != self._mapping:
            for lora_id in mapping.lora_index_mapping:
                self._get(lora_id)
            self._mapping = mapping

    def step_inputs(self) -> TensorMap:
        """Return the LoRA inputs of a step with the mapping's rows, by the engine's names.

        Its adapters are activated, and so stay in their slots.

        Raises:
            StateError: no mapping is set.
            ConfigError: (a ValueError) all slots are taken by other active adapters.
            UnknownAdapterError: (a KeyError) one of its adapters was removed.
        """
        if self._mapping is None:
            raise StateError("no row has an adapter yet; call set_adapter_mapping first")
        start = time.perf_counter()
        for lora_id in self._mapping.lora_index_mapping:
            self.activate_adapter(lora_id)
        ids = self._mapping.lora_ids
        names = [None if id_ is None else self._get(id_).model.adapter_name for id_ in ids]
        rows = self.adapters.rows(names)
        self._switching.add(time.perf_counter() - start)
        return rows

    def get_lora_metrics(self) -> dict[str, dict[str, Any]]:
        """Return the sections "adapters", "memory" and "performance"; see `lora_metrics`."""
        numbers = len(self._registered), len(self._active), self.capacity
        is_batched = self.manifest.lora_plugin != "native"
        return lora_metrics(self.adapters.stats, *numbers, self._switching, is_batched)

    @property
    def _registered(self) -> OrderedDict[int, _Registered]:
        """Those that the adapters still have; the others are forgotten."""
        names = self.adapters.names
        for id_, known in list(self._known.items()):
            name = known.model.adapter_name
            if name not in names or self._generation(name) != known.generation:
                self._drop(id_)
        return self._known

    def _generation(self, name: str) -> int | None:
        with suppress(UnknownAdapterError):  # evicted since it was looked for
            return self.adapters.generation(name)
        return None

    def _drop(self, adapter_id: int) -> None:
        """Forget a number, and let go of its slot."""
        del self._known[adapter_id]
        self._pinned.discard(adapter_id)
        if (lease := self._active.pop(adapter_id, None)) is not None:
            self.adapters.release(lease)

    def _activate(self, lora_id: int, known: _Registered) -> None:
        name, generation = known.model.adapter_name, known.generation
        lease = self.adapters.lease(name, expected_generation=generation)
        try:
            self.adapters.activate(lease)
        except BaseException:
            self.adapters.release(lease)
            raise
        self._active[lora_id] = lease

    def _get(self, lora_id: int) -> _Registered:
        registered = self._registered
        if lora_id not in registered:
            ids = ", ".join(map(str, registered)) or "none"
            raise UnknownAdapterError(f"LoRA {lora_id} is not registered; registered: {ids}")
        return registered[lora_id]

    def _make_room(self) -> None:
        """See that one more adapter can be registered."""
        if len(self._registered) >= self.capacity:
            raise StateError(
                f"No free adapter slots: max_cpu_loras is {self.capacity}; remove an adapter, or "
                "use LRUCacheLoRAModelManager"
            )

    def _make_slot(self) -> int:
        """See that one more adapter can be active; return who is not any more."""
        raise ConfigError(
            f"No free lora slots: max_loras is {self.lora_slots}; deactivate an adapter, or use "
            "LRUCacheLoRAModelManager"
        )


class LRUCacheLoRAModelManager(LoRAModelManager):
    """The adapter that was used least recently makes room, unless it is pinned."""

    @checked
    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register an adapter; one that is registered counts as used, and False is returned."""
        if adapter.id in self._registered:
            self._registered.move_to_end(adapter.id)
        return super().add_adapter(adapter)

    @checked
    def activate_adapter(self, lora_id: int) -> bool:
        """Copy an adapter into a slot; one that is active counts as used, and False is returned."""
        is_new = super().activate_adapter(lora_id)
        self._registered.move_to_end(lora_id)
        self._active.move_to_end(lora_id)
        return is_new

    def remove_oldest_adapter(self) -> bool:
        """Forget the adapter that was used least recently; False if all are pinned, or none is."""
        oldest = next((id_ for id_ in self._registered if id_ not in self._pinned), None)
        return oldest is not None and self.remove_adapter(oldest)

    def _make_room(self) -> None:
        if len(self._registered) >= self.capacity and not self.remove_oldest_adapter():
            super()._make_room()

    def _make_slot(self) -> int:
        oldest = next((id_ for id_ in self._active if id_ not in self._pinned), None)
        if oldest is None or not self.deactivate_adapter(oldest):
            return super()._make_slot()
        return oldest
