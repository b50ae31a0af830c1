"""Map between fused and split modules: q, k, v and qkv; gate, up and gate_up.

A fused linear stacks the outputs of its parts, `y = [y_q | y_k | y_v]`. Its delta is therefore

    x @ [A_q | A_k | A_v] @ | B_q           |
                            |     B_k       |        rank: the sum of the parts' ranks
                            |          B_v  |

and the delta of a part of a fused pair is `x @ A @ B[:, its columns]`. Both are exact.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from trt_lora.plugins.contract.modules import PART_SUFFIXES, module_of, parts_of
from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.adapters.weight import Pair, Weight, block_diagonal, concatenate


def map_pairs(
    pairs: Mapping[str, Pair], sites: Sequence[Site]
) -> tuple[list[tuple[str, Pair]], dict[str, str]]:
    """Map pairs whose path is no site onto the sites that are their parts, or that they are of.

    Returns:
        (site path, pair) for every site reached; and path -> reason for pairs that reach none.
    """
    known = {_sibling_key(site.path): site for site in sites}
    wholes = {
        (_parent(site.path), name): (site, number)
        for site in sites
        for number, name in enumerate(parts_of(site.path))
    }
    mapped: list[tuple[str, Pair]] = []
    reasons: dict[str, str] = {}
    fused: dict[str, dict[int, Pair]] = defaultdict(dict)
    for path, pair in pairs.items():
        key, parent = _sibling_key(path), _parent(path)
        names = parts_of(path)
        if parts := [known[parent, name] for name in names if (parent, name) in known]:
            if reason := _why_no_pair(pair) or _why_not_whole(pair[1], parts, len(names)):
                reasons[path] = reason
            else:
                mapped += _split(pair, parts)
        elif key in wholes:
            site, part = wholes[key]
            if reason := _why_no_pair(pair) or _why_not_part(pair, site, part):
                reasons[path] = reason
            else:
                fused[site.path][part] = pair
    for site in sites:
        if site.experts and 0 < len(fused.get(site.path, ())) < len(site.parts):
            (part,) = fused.pop(site.path)
            here, absent = parts_of(site.path)[part], parts_of(site.path)[1 - part]
            path = f"{_parent(site.path)}.{PART_SUFFIXES[here]}"
            reasons[path] = f"gate and up of experts come together, and {absent} is missing"
    whole_sites = (site for site in sites if site.path in fused)
    return mapped + [(site.path, _fuse(fused[site.path], site)) for site in whole_sites], reasons


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _sibling_key(path: str) -> tuple[str, str] | None:
    """(the parent's path, the module's name): siblings share the first."""
    module = module_of(path)
    return (_parent(path), module.name) if module else None


def _why_no_pair(pair: Pair) -> str:
    """Sums of ranks could agree where the ranks of the parts do not."""
    ranks = pair[0].shape[-1], pair[1].shape[-2]
    return "" if ranks[0] == ranks[1] else f"its A has rank {ranks[0]}, its B rank {ranks[1]}"


def _why_not_whole(b: Weight, sites: Sequence[Site], expected: int) -> str:
    if len(sites) < expected:
        taken = ", ".join(site.path for site in sites)
        return f"of its {expected} parts the engine takes LoRA on {taken} alone"
    if sum(site.n for site in sites) != b.shape[-1]:
        widths = " + ".join(str(site.n) for site in sites)
        return f"its B has {b.shape[-1]} columns, its parts in the engine {widths}"
    return ""


def _split(pair: Pair, sites: Sequence[Site]) -> Iterator[tuple[str, Pair]]:
    a, b = pair
    starts = accumulate((site.n for site in sites), initial=0)
    for site, start in zip(sites, starts, strict=False):  # the last start is the end
        yield site.path, (a, b.part(1, start, start + site.n))


def _why_not_part(pair: Pair, site: Site, part: int) -> str:
    if not site.parts:
        return f"the manifest does not say where it begins in {site.path}"
    if len(pair[0].shape) != 2 + bool(site.experts):
        return f"its A has shape {list(pair[0].shape)}, {site.path} has {site.experts} experts"
    if pair[1].shape[-1] != site.parts[part]:
        columns = pair[1].shape[-1]
        return f"its B has {columns} columns, its part of {site.path} {site.parts[part]}"
    if pair[0].shape[-2] != site.k:
        return f"its A has {pair[0].shape[-2]} rows, {site.path} takes {site.k}"
    return ""


def _fuse(pairs: Mapping[int, Pair], site: Site) -> Pair:
    starts = [0, *accumulate(site.parts)]
    blocks = [(b, starts[part]) for part, (_, b) in sorted(pairs.items())]
    factors = [a for _, (a, _) in sorted(pairs.items())]
    return concatenate(factors, axis=-1), block_diagonal(blocks, site.n)
