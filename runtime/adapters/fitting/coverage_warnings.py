"""Log warnings about a loaded adapter: other base model, missing sites, flushed values."""

import logging
from collections.abc import Collection, Iterable, Iterator

from trt_lora.plugins.messages import listed, shown
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.base_check import is_other_base, scaled_base
from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype

_LOG = logging.getLogger(__name__)

_FLUSHED = 0.01  # part of a site's values; a few tiny ones become 0 in most casts to float16


def log_warnings(source: str, warnings: Iterable[str]) -> None:
    """Write them to the log `trt_lora`; where nobody set one up, Python prints them on stderr."""
    for warning in warnings:
        _LOG.warning("%s: %s", source, warning)


def coverage_warnings(adapter: Adapter, manifest: Manifest, coverage: Coverage) -> Iterator[str]:
    """Yield the warnings of a coverage, from its other fields."""
    base = manifest.base_model
    if is_other_base(adapter.base_model or "", manifest):
        yield (
            f"the adapter names {shown(adapter.base_model)} as its base model, the engine was "
            f"built from {base.name} ({base.architecture}); the shapes agree"
        )
    if reason := scaled_base(adapter, manifest):
        yield reason
    if missing := coverage.missing_sites:
        yield (
            f"the adapter's config targets {listed(missing)}, but its file has no tensors for "
            "them: it may be incomplete"
        )
    if adapter.targets is None and adapter.owned:
        yield from _few(coverage.sites)
    yield from adapter.warnings
    if keys := [*coverage.unexpected_keys]:
        yield f"{len(keys)} of its tensors have no binding in the engine: {listed(keys)}"
    yield from flushed_warnings(coverage.sites)


def flushed_warnings(sites: Iterable[SiteCoverage]) -> Iterator[str]:
    """Yield a warning if many values of a site became zero."""
    if lossy := [site for site in sites if site.flushed > _FLUSHED * _values(site)]:
        yield (
            f"{sum(site.flushed for site in lossy)} values became 0 in {lossy[0].dtype}, more than "
            f"{_FLUSHED:.0%} of those of {listed([site.path for site in lossy])}"
        )


def _few(sites: Collection[SiteCoverage]) -> Iterator[str]:
    """Without a config, only the other sites of its modules tell what the adapter should have."""
    modules = {site.path.rpartition(".")[2] for site in sites if site.rank}
    alike = [site for site in sites if site.path.rpartition(".")[2] in modules]
    adapted = sum(site.rank > 0 for site in alike)
    if adapted < len(alike) / 2:
        yield (
            f"the adapter has tensors for {adapted} of the {len(alike)} sites of "
            f"{listed(sorted(modules))}: it may be incomplete"
        )


def _values(site: SiteCoverage) -> float:
    return site.nbytes / storage_dtype(site.dtype).itemsize if site.rank else 0
