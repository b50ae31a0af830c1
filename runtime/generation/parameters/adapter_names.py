"""Names of the adapters of prompts, or of the rows of a graph's run, at a strength."""

from collections.abc import Sequence

from trt_lora.runtime.generation.text.prompts import one_each
from trt_lora.runtime.store.names import checked_scale, strength_name

Adapters = str | Sequence[str | None] | None  # of all, or of each; None is the base model


def adapter_names(
    adapter: Adapters, scale: float, items: Sequence[object], of: str = "prompt"
) -> list[str | None]:
    """Return the name of each item's adapter at a strength; `of` is what messages call an item.

    Raises:
        ConfigError: there are not as many adapters as items.
        AdapterError: the scale is no finite number.
    """
    if adapter is None or isinstance(adapter, str):
        names = [adapter] * len(items)
    else:
        names = one_each("adapter", adapter, items, of)
    scale = checked_scale(scale, "the adapters")
    return [None if name is None else strength_name(name, scale) for name in names]
