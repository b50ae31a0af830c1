"""A blend at other strengths, written over the values that it has: the same memory, B alone."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from threading import Lock

import numpy as np

from trt_lora.runtime.adapters.blend import strength_at
from trt_lora.runtime.adapters.cast import Caster, Conversion
from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import flushed_warnings, log_warnings
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.store.blend_source import BlendSource
from trt_lora.runtime.store.entry import Entry, Loaded
from trt_lora.runtime.store.levels import Levels

Changes = Mapping[str, Sequence[tuple[float, Conversion]]]  # of the parts of each site, by its path


class Rewriter:
    """Gives blends other strengths; every value is made of the parts' own, and rounded once."""

    def __init__(self, levels: Levels) -> None:
        """Take what the store knows."""
        self._levels, self._turn = levels, Lock()

    @cached_property
    def _caster(self) -> Caster:
        """Its scratch memory is used by one thread; stores without blends never have it."""
        return Caster()

    def rewrite(self, name: str, source: BlendSource, version: int) -> Coverage | None:
        """Let a blend mean `source` from now on, if it is made of the same versions.

        Returns:
            What `get_coverage` says then; None where it has to be made anew: it is none of these,
            is not in memory, or somebody has a lease of it or is moving it.

        Raises:
            AdapterError: a value leaves the range of the engine's dtype, or the files of a part
                are gone or changed. The blend is as it was.
            StateError: memory has no room for a part.
        """
        with self._levels.lock:
            entry = self._levels.names.entries.get(name)
            if entry is None or not _is_rewritable(entry, source):
                return None
            before = copy(entry)
            _take(entry, source, version)
        try:
            loaded = self._written(before, source)
        except BaseException:
            with self._levels.lock:
                entry.version, entry.source = before.version, before.source
                self._give_back(entry, before, before.loaded)
            raise
        with self._levels.lock:
            entry.content_hash = source.content_hash(loaded.fitted)
            self._levels.let_go(self._levels.names.remove_made_of(entry))
            self._give_back(entry, before, loaded)
        log_warnings(name, loaded.fitted.coverage.warnings)
        return loaded.fitted.coverage

    def _give_back(self, entry: Entry, before: Entry, loaded: Loaded | None) -> None:
        """End the wait of those who want the blend; under the store's lock."""
        assert entry.in_memory is not None
        assert loaded is not None
        entry.loaded = loaded
        entry.in_memory.set_result(loaded)
        if entry.in_slot is not None and before.in_slot is not None:
            entry.in_slot.set_result(before.in_slot.result())
        self._levels.touch(entry)
        self._levels.stop_moving(entry)

    def _written(self, before: Entry, source: BlendSource) -> Loaded:
        """Write the new values; on an error, the old ones."""
        loaded, old = before.loaded, before.source
        assert loaded is not None
        assert isinstance(old, BlendSource)
        slot = None if before.in_slot is None else before.in_slot.result()
        with ExitStack() as stack:
            keep = self._levels.kept_in_memory
            parts = [stack.enter_context(keep(part)) for part in source.entries]
            stack.enter_context(self._turn)
            try:
                changes = self._write(loaded, parts, source)
                self._levels.device.rewrite(loaded, slot)
            except BaseException:
                self._write(loaded, parts, old)
                self._levels.device.rewrite(loaded, slot)
                raise
        coverage = _coverage(loaded.fitted.coverage, changes)
        return replace(loaded, fitted=Fitted(loaded.fitted.tensors, coverage))

    @np.errstate(over="raise", invalid="raise")
    def _write(self, loaded: Loaded, parts: Sequence[Loaded], source: BlendSource) -> Changes:
        """Write every part's B, times its strength, to its rows of the blend's on the host."""
        self._caster.forget_scales()
        manifest, rows = source.fit.manifest, Counter[str]()
        out = loaded.b_on_host(manifest)
        changes = defaultdict[str, list[tuple[float, Conversion]]](list)
        for part, (_, strength) in zip(parts, source.parts, strict=True):
            values = part.b_on_host(manifest)
            for site in part.fitted.coverage.adapted:
                path, first = site.path, rows[site.path]
                rows[path] = end = first + site.rank
                scale = strength_at(strength, path)
                own, target = values[path][..., : site.rank, :], out[path][..., first:end, :]
                label = f"{source.name}: {manifest.binding_names.binding('B', path)}"
                change = self._scale(own, scale, site.dtype, target, label)
                changes[path].append((scale, change))
        return changes

    def _scale(self, values: Array, scale: float, dtype: str, out: Array, label: str) -> Conversion:
        if dtype == "float32":
            with suppress(FloatingPointError):  # the caster says by which value
                if np.isfinite(factor := np.float32(scale)):
                    np.multiply(values, factor, out=out)
                    return Conversion()
        weight = Weight((), values.shape, dtype, lambda buffer=None: values, scale)
        return self._caster.write(weight, dtype, out, label)


def _is_rewritable(entry: Entry, source: BlendSource) -> bool:
    """Whether an entry has what `source` is made of, and nobody reads it; under the lock."""
    return (
        isinstance(entry.source, BlendSource)
        and entry.source.entries == source.entries
        and entry.is_loaded
        and not entry.leases
        and not entry.moving
        and (entry.in_slot is None or entry.in_slot.done())
    )


def _take(entry: Entry, source: BlendSource, version: int) -> None:
    """Let those who want a blend wait until it is written; under the lock."""
    entry.moving += 1
    entry.version, entry.source = version, source
    entry.in_memory, entry.loaded = Future(), None
    if entry.in_slot is not None:
        entry.in_slot = Future()


def _coverage(before: Coverage, changes: Changes) -> Coverage:
    """Return the report of a blend with what other strengths have changed."""

    def of_site(site: SiteCoverage) -> SiteCoverage:
        if not site.rank:
            return site
        scales, conversions = zip(*changes[site.path], strict=True)
        is_one = len({*scales}) == 1  # otherwise values are computed in float32, without a scale
        dtypes = dict.fromkeys((site.dtype, site.dtype if is_one else "float32"))
        change = Conversion.of_all(conversions)
        return replace(
            site,
            scales=(scales[0] if is_one else 1.0,),
            source_dtypes=tuple(dtypes),
            rounding_error=change.rounding_error,
            flushed=change.flushed,
        )

    sites = tuple(map(of_site, before.sites))
    return replace(before, sites=sites, warnings=tuple(flushed_warnings(sites)))
