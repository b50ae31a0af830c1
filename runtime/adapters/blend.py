"""Weighted sum of loaded adapters, by concatenating their ranks.

    w1 (x A1) B1 + w2 (x A2) B2  =  x [A1 | A2] [w1 B1; w2 B2]

so a blend has the sum of the ranks, and rounds nothing but each scaled B, once. PEFT calls it
`add_weighted_adapter(combination_type="cat")`.
"""

from collections.abc import Sequence
from dataclasses import replace

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import Pair, concatenate


def blend_adapters(name: str, parts: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Return the sum of the adapters' deltas, each times its weight.

    What is made of it has memory of its own, so that nothing of a part stays when that is unloaded.

    Raises:
        AdapterError: an adapter has a factor without its other, or their shapes disagree.
    """
    sites: dict[str, list[Pair]] = {}
    for adapter, scale in parts:
        for path, (a, b) in adapter.pairs().items():
            own = replace(a, tensor=None), replace(b.times(scale), tensor=None)
            sites.setdefault(path, []).append(own)
    for path, pairs in sites.items():
        _check_shapes(pairs, f"{name}: {path}")
    summed = Adapter.of_pairs(name, {path: _sum(pairs) for path, pairs in sites.items()})
    return replace(summed, targets=sites.__contains__)  # what it lacks, its parts lack


def _check_shapes(pairs: Sequence[Pair], label: str) -> None:
    """Check shapes here too: before an engine is bound nothing else does."""
    shapes = [(a.shape, b.shape) for a, b in pairs]
    if any(len(shape) not in (2, 3) for both in shapes for shape in both):
        raise AdapterError(f"{label}: a factor has a shape that is no matrix's: {shapes}")
    for a, b in shapes:
        if a[-1] != b[-2]:
            raise AdapterError(f"{label}: A has rank {a[-1]} but B has rank {b[-2]}")
    if len({(a[:-1], b[:-2], b[-1]) for a, b in shapes}) > 1:
        raise AdapterError(f"{label}: the parts have other shapes: {shapes}; other base models?")


def _sum(pairs: Sequence[Pair]) -> Pair:
    factors = [a for a, _ in pairs], [b for _, b in pairs]
    return concatenate(factors[0], axis=-1), concatenate(factors[1], axis=-2)
