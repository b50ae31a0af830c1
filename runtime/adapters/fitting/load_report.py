"""The coverage of an adapter whose weights have found their bindings."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from trt_lora.plugins.contract.sites import VECTORS, Site
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.fitting.base_check import compare_copies
from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import coverage_warnings
from trt_lora.runtime.adapters.fitting.no_effect import NO_EFFECT, without_effect
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import Tensor


def coverage_of(
    adapter: Adapter,
    manifest: Manifest,
    weights: Mapping[str, Weight],
    unexpected_keys: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    conversions: Mapping[str, Conversion],
) -> Coverage:
    """Return the report.

    Args:
        adapter: as it is for the engine's weights.
        manifest: of the engine.
        weights: under the engine's binding names.
        unexpected_keys: tensor -> why it has no binding.
        tensors: as they are held, by binding.
        conversions: what casts changed, by binding.
    """
    sources = {name: weight for weight in adapter.weights.values() for name in weight.names}

    def of_site(site: Site) -> SiteCoverage:
        names = manifest.binding_names.pair(site.path)
        if names[0] not in weights:
            return SiteCoverage(site.path)
        a, b = (weights[name] for name in names)
        beside = {f: manifest.binding_names.binding(f, site.path) for f in VECTORS}
        vectors = {factor: name for factor, name in beside.items() if name in weights}
        every = *names, *vectors.values()
        change = Conversion.of_all(conversions[name] for name in every if name in conversions)
        return SiteCoverage(
            site.path,
            rank=a.shape[-1],
            scales=tuple(dict.fromkeys(sources[n].scale * sources[n].folded for n in b.names)),
            source_dtypes=tuple(dict.fromkeys(sources[name].dtype for name in a.names + b.names)),
            dtype=site.dtype,
            rounding_error=change.rounding_error,
            flushed=change.flushed,
            nbytes=sum(tensors[name].nbytes for name in every),
            vectors=tuple(vectors),
        )

    idle = [adapter.weights[name].names for name in without_effect(adapter, manifest)]
    ignored = dict.fromkeys(chain.from_iterable(idle), NO_EFFECT) | dict(adapter.ignored)
    ignored |= compare_copies(adapter, manifest.base_model.embeddings)[0]
    sites = tuple(map(of_site, manifest.sites))
    targets = adapter.targets or (lambda _: False)
    missing = tuple(site.path for site in sites if not site.rank and targets(site.path))
    coverage = Coverage(
        adapter.source,
        {name: weights[name].names if name in weights else () for name in manifest.lora_bindings},
        unexpected_keys,
        sites,
        missing,
        ignored,
    )
    return replace(coverage, warnings=tuple(coverage_warnings(adapter, manifest, coverage)))
