"""vLLM's `LoRAModelManager`: register, activate and remove adapters by number."""

import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from trt_lora.plugins.checked import checked
from trt_lora.plugins.contract.modules import PART_SUFFIXES, parts_of
from trt_lora.plugins.errors import ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.interfaces.vllm.config import LoRAConfig
from trt_lora.runtime.interfaces.vllm.mapping import LoRAMapping
from trt_lora.runtime.interfaces.vllm.model import LoRAModel
from trt_lora.runtime.memory.tensor import TensorMap
from trt_lora.runtime.store.store import AdapterStore

_MIB = 1 << 20


class LoRAModelManager:
    """Numbers for the adapters of an engine with slots, whose store knows all the rest.

    An active adapter is one that lies in a slot. One that was evicted, unloaded or replaced behind
    the manager is not registered any more. vLLM's arguments model, max_num_seqs,
    max_num_batched_tokens, vocab_size and device are the engine's. One thread at a time may call
    it.
    """

    @checked
    def __init__(self, lora_config: LoRAConfig, adapters: AdapterStore) -> None:
        """Take an engine's adapters.

        Args:
            lora_config: see there; `adapters` are made with its `store_config`.
            adapters: of a running engine.

        Raises:
            ConfigError: an option is not what the adapters have, or the engine has no slots.
        """
        self.lora_config = lora_config.resolved(adapters)
        self.adapters, self.manifest = adapters, adapters.manifest
        self._numbers: dict[int, tuple[LoRAModel, int]] = {}  # and which version of its name it is
        self._mapping: LoRAMapping | None = None  # of the next step
        self._steps, self._step_seconds = 0, 0.0

    @property
    def capacity(self) -> int:
        """Adapters that can be registered."""
        return self.lora_config.max_cpu_loras or 0

    @property
    def lora_slots(self) -> int:
        """Adapters that can be active."""
        return self.lora_config.max_loras or 0

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The id of the active adapter in every slot."""
        slots = self.adapters.bindings.slots
        ids = {slots.get(model.adapter_name): id_ for id_, model in self.list_adapters().items()}
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
        if adapter.id in self.list_adapters():
            return False
        self._make_room()
        name = adapter.adapter_name
        if adapter.path is None:
            self.adapters.add(name, adapter.adapter)
        else:  # so that it can be read again once it was evicted
            self.adapters.load(name, adapter.path)
        self._numbers[adapter.id] = adapter, self.adapters.info(name).version
        return True

    @checked
    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter; False if it is not registered."""
        if adapter_id not in self.list_adapters():
            return False
        model, version = self._numbers.pop(adapter_id)
        with suppress(UnknownAdapterError, StateError):  # another thread was faster
            self.adapters.unload(model.adapter_name, expected_version=version)  # its pin ends too
        return True

    def remove_all_adapters(self) -> None:
        """Forget all adapters."""
        for adapter_id in self.list_adapters():
            self.remove_adapter(adapter_id)

    @checked
    def activate_adapter(self, lora_id: int) -> bool:
        """Copy an adapter into a slot; False if it is active.

        Raises:
            UnknownAdapterError: (a KeyError) it is not registered.
            ConfigError: (a ValueError) all slots are taken by active adapters.
        """
        name = self._name(lora_id)
        if name in self.adapters.bindings.slots:
            return False
        self._check_slot(name)
        self.adapters.bindings.activate(name)
        return True

    @checked
    def deactivate_adapter(self, adapter_id: int) -> bool:
        """Take an adapter out of its slot.

        False if it is not active, or is pinned or in use: that one stays.
        """
        model = self.get_adapter(adapter_id)
        return model is not None and self.adapters.bindings.deactivate(model.adapter_name)

    @checked
    def pin_adapter(self, adapter_id: int) -> bool:
        """Activate an adapter and keep it until it is removed; vLLM's LRU manager alone can.

        Raises:
            UnknownAdapterError: (a KeyError) it is not registered.
            ConfigError: (a ValueError) all slots are taken.
        """
        self.activate_adapter(adapter_id)
        self.adapters.pin(self._name(adapter_id), allow_last=True)
        return True

    def list_adapters(self) -> dict[int, LoRAModel]:
        """Return the registered adapters by number: those that the store has as they were."""
        self._numbers = {
            id_: (model, version)
            for id_, (model, version) in self._numbers.items()
            if self._version(model.adapter_name) == version
        }
        return {id_: model for id_, (model, _) in self._numbers.items()}

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
        for lora_id in mapping.lora_index_mapping:
            self._name(lora_id)
        self._mapping = mapping

    def step_inputs(self) -> TensorMap:
        """Return the LoRA inputs of a step with the mapping's rows, by the engine's names.

        Its adapters are activated. Where other threads load meanwhile, lease them for the step.

        Raises:
            StateError: no mapping is set, or it has more adapters than there are slots.
            ConfigError: (a ValueError) all slots are taken by other active adapters.
            UnknownAdapterError: (a KeyError) one of its adapters was removed.
        """
        if self._mapping is None:
            raise StateError("no row has an adapter yet; call set_adapter_mapping first")
        start = time.perf_counter()
        names = [None if id_ is None else self._name(id_) for id_ in self._mapping.lora_ids]
        for name in dict.fromkeys(names):
            if name is not None and name not in self.adapters.bindings.slots:
                self._check_slot(name)
        rows = self.adapters.bindings.rows(names)
        self._step_seconds += time.perf_counter() - start
        self._steps += 1
        return rows

    def get_lora_metrics(self) -> dict[str, dict[str, Any]]:
        """Return what vLLM's `get_lora_metrics` does, in its units: MiB and seconds.

        adapters      registered, active, capacity, utilization (active adapters by slots)
        memory        adapter_memory_mb (on the host), gpu_memory_usage (all slots),
                      memory_efficiency (slots that hold an adapter, by slots)
        performance   avg_activation_time (copies into a slot), avg_switching_time (a step's rows),
                      punica_kernel_enabled (one launch for all adapters: the plugin's kernels)
        """
        stats = self.adapters.stats
        active = sum(id_ is not None for id_ in self.lora_index_to_id)
        return {
            "adapters": {
                "registered": len(self.list_adapters()),
                "active": active,
                "capacity": self.capacity,
                "utilization": active / stats.slots,
            },
            "memory": {
                "adapter_memory_mb": stats.memory_bytes / _MIB,
                "gpu_memory_usage": stats.slots * stats.slot_bytes / _MIB,
                "memory_efficiency": stats.in_slots / stats.slots,
            },
            "performance": {
                "avg_activation_time": stats.copy_seconds / max(stats.copies, 1),
                "avg_switching_time": self._step_seconds / max(self._steps, 1),
                "punica_kernel_enabled": self.manifest.lora_plugin != "native",
            },
        }

    def _version(self, name: str) -> int | None:
        with suppress(UnknownAdapterError):
            return self.adapters.info(name).version
        return None

    def _name(self, lora_id: int) -> str:
        registered = self.list_adapters()
        if lora_id not in registered:
            ids = ", ".join(map(str, registered)) or "none"
            raise UnknownAdapterError(f"LoRA {lora_id} is not registered; registered: {ids}")
        return registered[lora_id].adapter_name

    def _make_room(self) -> None:
        """See that one more adapter can be registered."""
        if len(self.list_adapters()) >= self.capacity:
            raise StateError(
                f"No free adapter slots: max_cpu_loras is {self.capacity}; remove an adapter, or "
                "use LRUCacheLoRAModelManager"
            )

    def _check_slot(self, name: str) -> None:
        """See that one more adapter can be active."""
        if len(self._kept() - {name}) >= self.lora_slots:
            raise ConfigError(
                f"No free lora slots: max_loras is {self.lora_slots}; deactivate an adapter, or "
                "use LRUCacheLoRAModelManager"
            )

    def _kept(self) -> AbstractSet[str]:
        """The adapters that no other one can take the slot of."""
        return self.adapters.bindings.slots.keys()


class LRUCacheLoRAModelManager(LoRAModelManager):
    """The adapter that was used least recently makes room, unless it is pinned."""

    @checked
    def add_adapter(self, adapter: LoRAModel) -> bool:
        """Register an adapter; one that is registered counts as used, and False is returned."""
        known = self.get_adapter(adapter.id)
        if known is not None:
            self.adapters.bindings.touch(known.adapter_name)
        return super().add_adapter(adapter)

    @checked
    def activate_adapter(self, lora_id: int) -> bool:
        """Copy an adapter into a slot; one that is active counts as used, and False is returned."""
        is_new = super().activate_adapter(lora_id)
        self.adapters.bindings.touch(self._name(lora_id))
        return is_new

    def remove_oldest_adapter(self) -> bool:
        """Forget the adapter that was used least recently; False if all are pinned, or none is."""
        pinned = self.adapters.pinned
        ids = {model.adapter_name: id_ for id_, model in self.list_adapters().items()}
        for name in self.adapters.bindings.by_use:
            if name in ids and name not in pinned:
                return self.remove_adapter(ids[name])
        return False

    def _make_room(self) -> None:
        if len(self.list_adapters()) >= self.capacity and not self.remove_oldest_adapter():
            super()._make_room()

    def _kept(self) -> AbstractSet[str]:
        return self.adapters.pinned
