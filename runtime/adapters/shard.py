"""Tensor-parallel shard of an adapter.

Column-parallel: every rank computes some columns of y, so B is split on n and A is whole.
Row-parallel: every rank reads some columns of x, so A is split on k and B is whole; the ranks' y
are summed. The parts of a fused linear are split one by one. Source: TensorRT-LLM's documentation,
"LoRA with tensor parallel".
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from trt_lora.plugins.checked import checked
from trt_lora.plugins.contract.modules import PARTS
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import match_adapter
from trt_lora.runtime.adapters.weight import Pair, Weight, concatenate
from trt_lora.runtime.manifest import Manifest

# Modules whose outputs, or inputs, are whole heads.
_HEADED_COLUMNS = {f"{kind}_{part}" for kind in ("attn", "cross_attn") for part in ("qkv", *"qkv")}
_HEADED_ROWS = {"attn_dense", "cross_attn_dense"}


@checked
def shard_adapter(adapter: Adapter, manifest: Manifest, tp_rank: int, tp_size: int) -> Adapter:
    """Return the share of rank `tp_rank` of `tp_size`.

    Args:
        adapter: of the whole model.
        manifest: of an engine of the whole model: its sites, their parts and the heads' width.
        tp_rank: from 0.
        tp_size: number of ranks.

    Raises:
        ConfigError: there is no such rank.
        AdapterError: the adapter does not fit the model or has vectors, or a site cannot be divided
            evenly into whole heads.
    """
    if not 0 <= tp_rank < tp_size:
        raise ConfigError(f"tp_rank is {tp_rank} of {tp_size}; ranks are numbered from 0")
    adapter.check_alone()
    weights, _ = match_adapter(adapter, manifest)
    names = manifest.binding_names
    pairs: dict[str, Pair] = {}
    for site in manifest.sites:
        a, b = map(weights.get, names.pair(site.path))
        if a is not None and b is not None:
            pairs[site.path] = _shard(site, (a, b), manifest.base_model.head_dim, tp_rank, tp_size)
    return Adapter.of_pairs(adapter.source, pairs, adapter.base_model)


def _shard(site: Site, pair: Pair, head_dim: int, tp_rank: int, tp_size: int) -> Pair:
    a, b = pair
    module = site.module
    if site.experts and tp_size > 1:
        raise AdapterError(f"{site.path}: experts are not divided among ranks")
    if module is None:
        raise AdapterError(f"{site.path}: nothing says how tensor parallelism divides this module")
    if module.parallel == "replicated" or tp_size == 1:
        return a, b
    if module.parallel == "row":
        unit = head_dim if module.name in _HEADED_ROWS else 1
        return _share(a, 0, [site.k], unit, site, tp_rank, tp_size), b
    if module.name in PARTS and not site.parts:
        raise AdapterError(f"{site.path}: the manifest does not say where its parts begin")
    unit = head_dim if module.name in _HEADED_COLUMNS else 1
    return a, _share(b, 1, site.parts or [site.n], unit, site, tp_rank, tp_size)


def _share(
    weight: Weight, axis: int, widths: Sequence[int], unit: int, site: Site, rank: int, size: int
) -> Weight:
    """The rank's share of every part of an axis, one after another."""
    shares = []
    for start, stop in pairwise(accumulate(widths, initial=0)):
        width = stop - start
        if width % (max(unit, 1) * size):
            what = f"{width // unit} heads of {unit}" if unit > 1 else f"a width of {width}"
            raise AdapterError(f"{site.path}: {size} ranks cannot share {what} evenly")
        first = start + rank * (width // size)
        shares.append(weight.part(axis, first, first + width // size))
    return concatenate(shares, axis)
