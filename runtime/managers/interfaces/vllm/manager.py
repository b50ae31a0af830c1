"""vLLM's `LoRAModelManager`: register, activate and remove adapters by number."""

import time
from collections import OrderedDict
from typing import Any

from trt_lora.plugins.contract.modules import parts_of
from trt_lora.plugins.errors import ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.managers.interfaces.vllm.config import VllmLoRAConfig
from trt_lora.runtime.managers.interfaces.vllm.mapping import LoRAMapping
from trt_lora.runtime.managers.interfaces.vllm.metrics import Mean, lora_metrics
from trt_lora.runtime.managers.interfaces.vllm.model import PART_SUFFIXES, LoRAModel
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import TensorMap


class LoRAModelManager:
    """Numbers for the adapters of an engine with slots, which hold the weights.

    An active adapter is one that the manager leases: it stays in its slot. vLLM's arguments model,
    max_num_seqs, max_num_batched_tokens, vocab_size and device are the engine's. One thread at a
    time may call it.
    """

    def __init__(
        self, lora_config: VllmLoRAConfig, adapters: SlotAdapters, manifest: Manifest
    ) -> None:
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
        self._registered: OrderedDict[int, LoRAModel] = OrderedDict()  # least recently used first
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
        ids = {self.adapters.slots[self._registered[id_].adapter_name]: id_ for id_ in self._active}
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

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register an adapter; False if its number is registered.

        Raises:
            StateError: (a RuntimeError) `capacity` adapters are registered.
            AdapterError: (a ValueError) the engine cannot take it.
        """
        if adapter.id in self._registered:
            return False
        self._make_room()
        if adapter.path is None:
            self.adapters.add_adapter(adapter.adapter_name, adapter.adapter)
        else:  # so that it can be read again once it was evicted
            self.adapters.load_weights(adapter.adapter_name, adapter.path)
        self._registered[adapter.id] = adapter
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter; False if it is not registered."""
        model = self._registered.get(adapter_id)
        if model is None:
            return False
        self._pinned.discard(adapter_id)
        self.deactivate_adapter(adapter_id)
        self.adapters.unload(model.adapter_name)  # its pin ends too
        del self._registered[adapter_id]
        return True

    def remove_all_adapters(self) -> None:
        """Forget all adapters."""
        for adapter_id in list(self._registered):
            self.remove_adapter(adapter_id)

    def activate_adapter(self, lora_id: int) -> bool:
        """Copy an adapter into a slot, where it stays; False if it is active.

        Raises:
            UnknownAdapterError: (a KeyError) it is not registered.
            ConfigError: (a ValueError) all slots are taken by active adapters.
        """
        if lora_id in self._active:
            return False
        name = self._get(lora_id).adapter_name
        if len(self._active) == self.lora_slots:
            self._make_slot()
        lease = self.adapters.lease(name)
        try:
            self.adapters.activate(lease)
        except BaseException:
            self.adapters.release(lease)
            raise
        self._active[lora_id] = lease
        return True

    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Let an adapter leave its slot when another needs it.

        False if it is not active, or is pinned: that one stays.
        """
        if adapter_id not in self._active or adapter_id in self._pinned:
            return False
        self.adapters.release(self._active.pop(adapter_id))
        return True

    def pin_adapter(self, adapter_id: int) -> bool:
        """Activate an adapter and keep it until it is removed; vLLM's LRU manager alone can.

        Raises:
            UnknownAdapterError: (a KeyError) it is not registered.
            ConfigError: (a ValueError) all slots are taken.
        """
        self.activate_adapter(adapter_id)
        if adapter_id not in self._pinned:
            self.adapters.pin(self._registered[adapter_id].adapter_name)
            self._pinned.add(adapter_id)
        return True

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Return the registered adapters by number."""
        return dict(self._registered)

    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        """Return an adapter; None if it is not registered."""
        return self._registered.get(adapter_id)

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
        names = [None if id_ is None else self._get(id_).adapter_name for id_ in ids]
        rows = self.adapters.rows(names)
        self._switching.add(time.perf_counter() - start)
        return rows

    def get_lora_metrics(self) -> dict[str, dict[str, Any]]:
        """Return the sections "adapters", "memory" and "performance"; see `lora_metrics`."""
        numbers = len(self._registered), len(self._active), self.capacity
        is_batched = self.manifest.lora_plugin != "native"
        return lora_metrics(self.adapters.stats, *numbers, self._switching, is_batched)

    def _get(self, lora_id: int) -> LoRAModel:
        if lora_id not in self._registered:
            ids = ", ".join(map(str, self._registered)) or "none"
            raise UnknownAdapterError(f"LoRA {lora_id} is not registered; registered: {ids}")
        return self._registered[lora_id]

    def _make_room(self) -> None:
        """See that one more adapter can be registered."""
        if len(self._registered) >= self.capacity:
            raise StateError(
                f"No free adapter slots: max_cpu_loras is {self.capacity}; remove an adapter, or "
                "use LRUCacheLoRAModelManager"
            )

    def _make_slot(self) -> None:
        """See that one more adapter can be active."""
        raise ConfigError(
            f"No free lora slots: max_loras is {self.lora_slots}; deactivate an adapter, or use "
            "LRUCacheLoRAModelManager"
        )


class LRUCacheLoRAModelManager(LoRAModelManager):
    """The adapter that was used least recently makes room, unless it is pinned."""

    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register an adapter; one that is registered counts as used, and False is returned."""
        if adapter.id in self._registered:
            self._registered.move_to_end(adapter.id)
        return super().add_adapter(adapter)

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

    def _make_slot(self) -> None:
        oldest = next((id_ for id_ in self._active if id_ not in self._pinned), None)
        if oldest is None or not self.deactivate_adapter(oldest):
            super()._make_slot()
