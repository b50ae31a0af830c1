"""A loaded adapter, before and after its manager has an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.strength import scaled_factors
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.managers.slots.one_slot import as_slot
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import Tensor

Bindings = Mapping[str, Tensor]


@dataclass(frozen=True)
class PendingAdapter:
    """An adapter in host memory, to be fitted once an engine is known."""

    adapter: Adapter
    tensors: Bindings  # as the source has them
    strict: bool = True
    bound: Bindings = field(default_factory=dict)  # none: no engine says what is to be bound
    coverage: None = None

    @classmethod
    def from_adapter(cls, adapter: Adapter, *, strict: bool) -> "PendingAdapter":
        """Read the adapter's files whole, so that they may change.

        Raises:
            AdapterError: a file changed, a value is not finite, or a weight is no matrix.
        """
        adapter = adapter.in_memory()
        tensors = {n: w.tensor for n, w in adapter.weights.items() if w.tensor is not None}
        return cls(adapter, tensors, strict)

    def at_strength(self, scale: float) -> tuple[Bindings, Bindings]:
        """Return `tensors` and `bound` with every B times `scale`, in float32: no dtype is known.

        Raises:
            AdapterError: a product leaves the range of float32.
        """
        return {**self.tensors, **scaled_factors(self.adapter, scale, "float32")}, self.bound


@dataclass(frozen=True)
class BoundAdapter:
    """An adapter fitted to an engine, on its device."""

    adapter: Adapter  # of the tensors below without the padding of a slot, the source of blends
    tensors: Bindings
    strict: bool
    bound: Bindings  # every LoRA input of the engine, with dummies
    coverage: Coverage
    memory: Memory  # of the engine
    is_slot: bool = False  # bound as stacks of one slot

    def at_strength(self, scale: float) -> tuple[Bindings, Bindings]:
        """Return `tensors` and `bound` with every B times `scale`, in a buffer of its own.

        Raises:
            AdapterError: a product leaves the range of its dtype.
        """
        weights = {name: weight_of(name, tensor) for name, tensor in self.tensors.items()}
        whole = Adapter(self.adapter.source, weights)
        scaled = self.memory.upload(scaled_factors(whole, scale))
        bound = as_slot(scaled) if self.is_slot else scaled
        return {**self.tensors, **scaled}, {**self.bound, **bound}


LoadedAdapter = PendingAdapter | BoundAdapter
