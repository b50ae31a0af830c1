"""Rescale every B of an adapter into a new buffer."""

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.memory.tensor import Tensor


def scaled_factors(adapter: Adapter, scale: float, dtype: str | None = None) -> dict[str, Tensor]:
    """Return every B times `scale`, in one buffer of the host.

    Args:
        adapter: its weights are read, from a GPU where they lie there.
        scale: a finite number.
        dtype: of the result; that of each weight if None.

    Raises:
        AdapterError: a product leaves the range of its dtype, or a factor lacks its other.
    """
    every_b = {b for _, b in adapter.pairs().values()}
    weights = {name: w.times(scale) for name, w in adapter.weights.items() if w in every_b}
    dtypes = {name: dtype or weight.dtype for name, weight in weights.items()}
    tensors, _ = pack_weights(weights, dtypes, adapter.source)
    return tensors
