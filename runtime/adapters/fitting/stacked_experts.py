"""Linears of single experts, as older releases of transformers have them, as matrices of all.

A [k, r] of `experts.3.gate_proj` (or `w1`) becomes one of A [E, k, r] of `experts.w1`, which is a
part of `experts.gate_up_proj`; an expert that the adapter leaves out gets zeros. Gate and up may
have other ranks, the experts of one of them may not.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from trt_lora.plugins.contract.modules import (
    EXPERT_PARAMETERS,
    EXPERTS_DOWN,
    PART_SUFFIXES,
    expert_of,
    module_of,
)
from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.adapters.weight import Pair, stacked


def stack_experts(
    pairs: Mapping[str, Pair], sites: Sequence[Site]
) -> tuple[dict[str, Pair], dict[str, str]]:
    """Return all pairs, those of single experts stacked, and path -> why one cannot be.

    A pair whose experts take no LoRA in the engine stays as it is.
    """
    counts = {site.path.rpartition(".")[0]: site.experts for site in sites if site.experts}
    found, reasons = dict[str, Pair](), dict[str, str]()
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for path, pair in pairs.items():
        one = expert_of(path)
        if one is None or together(path) == path or one[0] not in counts:
            found[path] = pair
        else:
            groups[together(path)][one[1]] = path
    for whole, paths in groups.items():
        count = counts[whole.rpartition(".")[0]]
        if why := _why_not(paths, pairs, count):
            reasons |= dict.fromkeys(paths.values(), why)
            continue
        a, b = (
            stacked({number: pairs[path][side] for number, path in paths.items()}, count)
            for side in (0, 1)
        )
        found[whole] = a, b
    return found, reasons


def together(path: str) -> str:
    """Return the path of a linear of one expert as that of all; any other as it is."""
    one, module = expert_of(path), module_of(path)
    if one is None or module is None:
        return path
    is_down = module.name == EXPERTS_DOWN
    return f"{one[0]}.{EXPERT_PARAMETERS[1] if is_down else PART_SUFFIXES[module.name]}"


def _why_not(paths: Mapping[int, str], pairs: Mapping[str, Pair], count: int) -> str:
    if max(paths) >= count:
        return f"it is of expert {max(paths)}, and the engine's are 0 to {count - 1}"
    shapes = {(a.shape, b.shape) for a, b in (pairs[path] for path in paths.values())}
    if len(shapes) > 1:
        ranks = sorted({a[1] for a, _ in shapes})
        return f"its experts have other ranks or shapes: {ranks}; those of one matrix have one rank"
    return ""
