"""EarlyAdapters: what a `LoRAManager` is given before it has an engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.blend import blend_adapters
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.memory.tensor import Tensor
from trt_lora.runtime.store.names import check_name, check_parts, name_is_taken, unknown_adapter


@dataclass(frozen=True)
class EarlyAdapter:
    """An adapter in host memory, and how it is to be fitted."""

    adapter: Adapter
    strict: bool


class EarlyAdapters(dict[str, EarlyAdapter]):
    """Adapters by name as their sources have them, for no engine says what they have to be."""

    def __missing__(self, name: str) -> NoReturn:
        """Refuse a name that no adapter has.

        Raises:
            UnknownAdapterError: always.
        """
        raise unknown_adapter(name, self)

    def check_new(self, name: str, *, replace: bool) -> None:
        """Refuse a name that a new adapter cannot have.

        Raises:
            AdapterError: it is no name, or is taken and may not be replaced.
        """
        check_name(name)
        if name in self and not replace:
            raise name_is_taken(name)

    def blended(self, name: str, parts: Mapping[str, float]) -> EarlyAdapter:
        """Return the weighted sum of adapters.

        Raises:
            UnknownAdapterError: a part is not there.
            AdapterError: there are no parts, a weight is no finite number, or shapes disagree.
        """
        weights = check_parts(name, parts)
        early = [self[part] for part in parts]
        factors = [(one.adapter, weight) for one, weight in zip(early, weights, strict=True)]
        summed = blend_adapters(name, factors).in_memory()
        return EarlyAdapter(summed, all(one.strict for one in early))

    def tensors(self, name: str, scale: float) -> dict[str, Tensor]:
        """Return the tensors of an adapter, every B times `scale`, in float32 if that is not 1.

        Raises:
            UnknownAdapterError: there is none of that name.
            AdapterError: a product leaves the range of float32, or a factor lacks its other.
        """
        adapter = self[name].adapter
        tensors = {n: w.tensor for n, w in adapter.weights.items() if w.tensor is not None}
        if scale == 1:
            return tensors
        every_b = {b for _, b in adapter.pairs().values()}
        weights = {name: w.times(scale) for name, w in adapter.weights.items() if w in every_b}
        scaled, _ = pack_weights(weights, dict.fromkeys(weights, "float32"), adapter.source)
        return tensors | scaled
