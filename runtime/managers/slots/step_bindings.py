"""LoRA inputs of a step: the stacks, and the slot of each row."""

from collections.abc import Collection, Sequence

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT, SLOT_DTYPE
from trt_lora.runtime.managers.slots.slot_stacks import SlotStacks
from trt_lora.runtime.memory.tensor import HOST, TensorMap, tensor_from_numpy


class StepBindings:
    """Makes the inputs, for one thread at a time; the same object as before for the same rows."""

    def __init__(self, stacks: SlotStacks, device: str) -> None:
        self._stacks, self._device = stacks, device
        self._last: tuple[Sequence[int | None], bool, TensorMap] | None = None

    def of(self, slots: Sequence[int | None], *, all_slots: bool) -> TensorMap:
        """Return the inputs of rows in these slots; None is the base model.

        On the host the stacks begin and end with the slots that the rows take.
        """
        if self._last and self._last[:2] == (slots, all_slots):
            return self._last[2]
        is_narrow = self._device == HOST and not all_slots
        taken = {slot for slot in slots if slot is not None}
        first, number = _range(taken) if is_narrow else (0, self._stacks.slots)
        of_rows = [BASE_SLOT if slot is None else slot - first for slot in slots]
        rows = tensor_from_numpy(np.array(of_rows, SLOT_DTYPE))
        step = TensorMap({**self._stacks.views(first, number), LORA_SLOT: rows})
        self._last = list(slots), all_slots, step
        return step


def _range(slots: Collection[int]) -> tuple[int, int]:
    """The first slot that a step binds, and how many; one where it needs none."""
    first, last = min(slots, default=0), max(slots, default=0)
    return first, last + 1 - first
