"""Weighted sum of loaded adapters, by concatenating their ranks.

    w1 (x A1) B1 + w2 (x A2) B2  =  x [A1 | A2] [w1 B1; w2 B2]

so a blend has the sum of the ranks, and rounds nothing but each scaled B, once. PEFT calls it
`add_weighted_adapter(combination_type="cat")`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import Pair, concatenate

Strength = float | Mapping[str, float]
"""What a delta is multiplied by: at all sites, or by prefixes of their paths; see `strength_at`."""

Parts = Mapping[str, Strength]
"""The adapters of a blend by name, each with its strength."""


def prefixes_of(path: str) -> Iterator[str]:
    """Yield a path, what is before each of its dots, the last one first, and the empty string."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def strength_at(strength: Strength, path: str) -> float:
    """Return the strength of one site: that of the longest prefix of its path; 1 without any."""
    if not isinstance(strength, Mapping):
        return strength
    return next((strength[p] for p in prefixes_of(path) if p in strength), 1.0)


def blend_adapters(name: str, parts: Sequence[tuple[Adapter, Strength]]) -> Adapter:
    """Return the sum of the adapters' deltas, each times its strength.

    What is made of it has memory of its own, so that nothing of a part stays when that is unloaded.

    Raises:
        AdapterError: an adapter has a factor without its other, or their shapes disagree.
    """
    sites: dict[str, list[Pair]] = {}
    for adapter, strength in parts:
        for path, (a, b) in adapter.pairs().items():
            scaled = b.times(strength_at(strength, path))
            own = replace(a, tensor=None), replace(scaled, tensor=None)
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
