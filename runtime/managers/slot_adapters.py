"""SlotAdapters: named adapters of an engine for many, and the slots of those in use."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT, SLOT_DTYPE
from trt_lora.plugins.errors import AdapterError, StateError, UnknownAdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.arguments import check_new_name
from trt_lora.runtime.managers.slot_stacks import SlotStacks
from trt_lora.runtime.memory.tensor import HOST, TensorMap, tensor_from_numpy


class SlotAdapters:
    """Adapters in host memory, the last ones used in the engine's slots too.

    One thread at a time may call it, and its engine may not run meanwhile: an adapter that is used
    again may be copied over another.
    """

    def __init__(self, executor: Executor) -> None:
        """Allocate the engine's stacks.

        Raises:
            ConfigError: the engine takes one adapter at a time.
            BackendError: the device is out of memory.
        """
        self._manifest, self._device = executor.manifest, executor.memory.device
        self.stacks = SlotStacks(executor.manifest, executor.memory)
        self._adapters: dict[str, Fitted] = {}
        self._slots: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._leases = Counter[str]()  # of those who use an adapter for more than a step

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters, in the order of loading."""
        return tuple(self._adapters)

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of every adapter that has one."""
        return dict(self._slots)

    def load_weights(self, name: str, path: str | Path, *, strict: bool = True) -> Coverage:
        """Load an adapter into host memory; see `LoRAManager.load_weights`.

        Raises:
            AdapterError: the name is taken or is no name, the adapter cannot be read, or the engine
                cannot take it.
        """
        check_new_name(name)
        if name in self._adapters:
            raise AdapterError(f"an adapter named {name!r} is loaded already; unload it first")
        adapter = load_adapter(path, self._manifest)
        fitted = fit_adapter(adapter, self._manifest, strict=strict)
        self._adapters[name] = fitted
        log_warnings(fitted.coverage.source, fitted.coverage.warnings)
        return fitted.coverage

    def unload(self, name: str) -> None:
        """Forget an adapter; its slot is free.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: it is leased.
        """
        self._get(name)
        if count := self._leases[name]:
            raise StateError(f"adapter {name!r} is in use by {count} sequences; let them end first")
        del self._adapters[name]
        if (slot := self._slots.pop(name, None)) is not None:
            self.stacks.clear(slot)

    def lease(self, name: str) -> None:
        """Keep an adapter loaded, and in its slot once it has one, until `release`.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: as many others are leased as there are slots.
        """
        self._get(name)
        others = self._leases.keys() - {name}
        if len(others) == self.stacks.slots:
            raise StateError(
                f"adapter {name!r} finds all {self.stacks.slots} slots in use by "
                f"{', '.join(sorted(others))}; wait for a sequence to end, or build with a larger "
                "--max-loras"
            )
        self._leases[name] += 1

    def release(self, name: str) -> None:
        """Give back a lease."""
        self._leases[name] -= 1
        if not self._leases[name]:
            del self._leases[name]

    def activate(self, name: str, keep: Collection[str] = ()) -> int:
        """Return the slot of an adapter; it is copied into one if it has none.

        Args:
            name: of a loaded adapter.
            keep: adapters that stay in their slots, as leased ones do; of the others the least
                recently used leaves.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: every slot holds an adapter that stays.
        """
        fitted = self._get(name)
        if name not in self._slots:
            slot = self._take_slot(keep)
            self.stacks.place(slot, fitted)
            self._slots[name] = slot
        self._slots.move_to_end(name)
        return self._slots[name]

    def rows(self, names: Sequence[str | None], *, all_slots: bool = False) -> TensorMap:
        """Return the LoRA inputs of a step: the stacks, and the slot of each row.

        On the host the stacks begin and end with the slots that the rows take.

        Args:
            names: the adapter of each row; None is the base model.
            all_slots: bind every slot on the host too, at the cost of all of them. From rank 32 on
                the bits of a row with an adapter may depend on how many are bound; then they depend
                on nothing that the other rows take.

        Raises:
            UnknownAdapterError: no adapter of that name is loaded.
            StateError: the rows take more adapters than there are slots.
        """
        wanted = [name for name in dict.fromkeys(names) if name is not None]
        for name in wanted:
            self._get(name)
        if len(wanted) > self.stacks.slots:
            raise StateError(
                f"{len(wanted)} adapters in one step are more than this engine's "
                f"{self.stacks.slots} slots; split the rows, or build with a larger --max-loras"
            )
        slots = {name: self.activate(name, wanted) for name in wanted}
        is_narrow = self._device == HOST and not all_slots
        first, count = _range(slots.values()) if is_narrow else (0, self.stacks.slots)
        of_rows = [BASE_SLOT if name is None else slots[name] - first for name in names]
        slot = tensor_from_numpy(np.array(of_rows, SLOT_DTYPE))
        return TensorMap({**self.stacks.views(first, count), LORA_SLOT: slot})

    def check_integrity(self) -> None:
        """Raise StateError if two adapters share a slot, or one that is not loaded is in use."""
        slots, used = list(self._slots.values()), self._slots.keys() | self._leases.keys()
        if len(set(slots)) < len(slots) or not used <= self._adapters.keys():
            raise StateError(
                f"slots {dict(self._slots)} and leases {dict(self._leases)} of the adapters "
                f"{self.names}"
            )

    def _take_slot(self, keep: Collection[str]) -> int:
        """Return the lowest free slot, or that of the adapter which was used least recently."""
        free = set(range(self.stacks.slots)).difference(self._slots.values())
        if free:
            return min(free)
        for name in self._slots:
            if name not in keep and name not in self._leases:
                return self._slots.pop(name)
        raise StateError(
            f"all {self.stacks.slots} slots are in use: {', '.join(self._slots)}; use fewer "
            "adapters in a step, or build with a larger --max-loras"
        )

    def _get(self, name: str) -> Fitted:
        if name not in self._adapters:
            raise UnknownAdapterError(
                f"unknown adapter {shown(name)}; loaded: {', '.join(self._adapters) or 'none'}"
            )
        return self._adapters[name]


def _range(slots: Collection[int]) -> tuple[int, int]:
    """The first slot that a step binds, and how many; one where it needs none."""
    first, last = min(slots, default=0), max(slots, default=0)
    return first, last + 1 - first
