"""New adapters from loaded ones: a weighted sum, or another strength.

    w1 (x A1) B1 + w2 (x A2) B2  =  x [A1 | A2] [w1 B1; w2 B2]

so a blend has the sum of the ranks, and rounds nothing but each scaled B, once. PEFT calls it
`add_weighted_adapter(combination_type="cat")`.
"""

import math
from collections.abc import Sequence

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.weight import Pair, concatenate


def scaled_adapter(adapter: Adapter, scale: float) -> Adapter:
    """Return the adapter with its delta times `scale`.

    Raises:
        AdapterError: the scale is not finite.
    """
    return blend_adapters(adapter.source, [(adapter, scale)])


def blend_adapters(name: str, parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Return the sum of the adapters' deltas, each times its weight.

    Raises:
        AdapterError: a weight is not finite, or an adapter has a factor without its other.
    """
    sites: dict[str, list[Pair]] = {}
    for adapter, scale in parts:
        if not math.isfinite(scale):
            raise AdapterError(f"{name}: a scale is {scale}, expected a finite number")
        for path, (a, b) in adapter.pairs().items():
            sites.setdefault(path, []).append((a, b.times(scale)))
    factors = {
        path: (
            concatenate([a for a, _ in pairs], axis=1),
            concatenate([b for _, b in pairs], axis=0),
        )
        for path, pairs in sites.items()
    }
    return Adapter.of_pairs(name, factors)
