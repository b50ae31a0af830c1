"""An engine on whose clock a run takes as long as its adapters say; the clock stands otherwise."""

from support.fakes.slot_engine import SlotEngine

from trt_lora.plugins.contract.slots import LORA_SLOT
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


class ClockedEngine(SlotEngine):
    """A run of the adapter of number n takes n + 1 seconds, and n more for each token of a prompt.

    The slowest row decides. A slowdown multiplies all of it from one run to the next.
    """

    def __init__(self, slots: int, slowdown: float = 1.0) -> None:
        super().__init__(slots)
        self.seconds, self.numbers = 0.0, list[int]()
        self._factor, self._slowdown = 1.0, slowdown

    def clock(self) -> float:
        """Return the time."""
        return self.seconds

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        slots = tensor_map[LORA_SLOT].numpy()
        stack = tensor_map[next(iter(self.manifest.lora_bindings))].numpy()
        numbers = [int(stack[slot, 0, 0]) if slot >= 0 else 0 for slot in slots]
        more = tensor_map["input_ids"].shape[1] - 1
        self.seconds += self._factor * (max(numbers) * (1 + more) + 1)
        self.numbers.append(max(numbers))
        return super().execute(tensor_map)

    def slow_down(self) -> None:
        """Take longer from now on."""
        self._factor *= self._slowdown
