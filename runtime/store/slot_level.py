"""SlotLevel: the slots of an engine for many, LRU, and the LoRA inputs of a step."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT, SLOT_DTYPE
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.host import ALIGNMENT, Memory, Stream
from trt_lora.runtime.memory.tensor import HOST, TensorMap, tensor_from_numpy
from trt_lora.runtime.store.config import bytes_of
from trt_lora.runtime.store.entry import Entry, Loaded
from trt_lora.runtime.store.slot_stacks import SlotStacks, slot_nbytes


class SlotLevel:
    """What lies in which slot: copies of what is in memory; its caller holds the store's lock."""

    def __init__(self, executor: Executor, device_memory: float | None) -> None:
        """Allocate the stacks.

        Args:
            executor: of an engine with slots.
            device_memory: bytes or a share of what is free; None for all slots.

        Raises:
            ConfigError: there is room for no slot.
            BackendError: the device is out of memory.
        """
        count = _slots_within(device_memory, executor.manifest, executor.memory)
        self.stacks = SlotStacks(executor.manifest, executor.memory, count)
        self.places: OrderedDict[Entry, int] = OrderedDict()  # least recently used first
        zeros = executor.memory.zeros(ALIGNMENT)
        self.zero = replace(zeros, shape=(1,), dtype=executor.manifest.dtype, owner=zeros)
        self._manifest = executor.manifest
        self._is_on_host = executor.memory.device == HOST
        self._last: tuple[Sequence[int | None], bool, TensorMap] | None = None

    @property
    def count(self) -> int:
        """How many slots there are."""
        return self.stacks.slots

    def load(self, fitted: Fitted, stream: Stream) -> Loaded:
        """Return an adapter in host memory, from where it is copied into slots."""
        del stream
        return Loaded(fitted)

    def rewrite(self, loaded: Loaded, slot: int | None) -> None:
        """Copy every B of an adapter to its slot, if it has one."""
        if slot is not None:
            self.stacks.rewrite(slot, loaded.b_on_host(self._manifest))

    def evictable(self) -> Entry | None:
        """Return the least recently used entry of those that can leave their slots."""
        return next((entry for entry in self.places if entry.is_evictable_from_slot), None)

    def take(self, entry: Entry) -> None:
        """Give an entry the lowest free slot."""
        self.places[entry] = min(set(range(self.count)).difference(self.places.values()))

    def touch(self, entry: Entry) -> None:
        """Make an entry the last one used."""
        self.places.move_to_end(entry)

    def leave(self, entry: Entry) -> None:
        """Take an entry out of its slot, whose values stay until another one comes."""
        if entry.in_slot is not None:
            del self.places[entry]
            entry.in_slot = None

    def clear(self, entry: Entry) -> None:
        """Take an entry out of its slot, and write zeros there."""
        if entry.in_slot is not None:
            self.stacks.clear(self.places[entry])
            self.leave(entry)

    def rows(self, entries: Sequence[Entry | None], *, all_slots: bool) -> TensorMap:
        """Return the LoRA inputs of rows whose adapters lie in slots; None is the base model.

        On the host the stacks begin and end with the slots that the rows take.
        """
        slots = [None if entry is None else self.places[entry] for entry in entries]
        if self._last and self._last[:2] == (slots, all_slots):
            return self._last[2]
        first, last = 0, self.count - 1
        if self._is_on_host and not all_slots:
            taken = [slot for slot in slots if slot is not None]
            first, last = min(taken, default=0), max(taken, default=0)
        of_rows = [BASE_SLOT if slot is None else slot - first for slot in slots]
        rows = tensor_from_numpy(np.array(of_rows, SLOT_DTYPE))
        step = TensorMap({**self.stacks.views(first, last + 1 - first), LORA_SLOT: rows})
        self._last = slots, all_slots, step
        return step


def _slots_within(device_memory: float | None, manifest: Manifest, memory: Memory) -> int:
    """How many slots the device's share has room for, at most the engine's."""
    nbytes = slot_nbytes(manifest)
    limit = bytes_of(device_memory, memory.free_bytes)
    slots = manifest.max_loras if limit is None else min(limit // nbytes, manifest.max_loras)
    if slots < 1:
        raise ConfigError(
            f"device_memory is {device_memory}, {limit:,} bytes; one slot of this engine takes "
            f"{nbytes:,}"
        )
    return int(slots)
