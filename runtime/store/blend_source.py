"""BlendSource: a weighted sum of adapters of the store, made when it is wanted."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.blend import Strength, blend_adapters
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.adapters.weight import Pair, weight_of, zeros
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.store.entry import Entry, Loaded
from trt_lora.runtime.store.source import Fit, Keep


@dataclass(frozen=True)
class BlendSource:
    """Versions of adapters and their strengths; a strength alone is a blend of one.

    Exact but for one rounding of each scaled B to the engine's dtype: the ranks of a site add up.
    The sum has memory of its own.
    """

    fit: Fit
    name: str  # of the sum, for messages
    parts: tuple[tuple[Entry, Strength], ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The versions that it is made of."""
        return tuple(entry for entry, _ in self.parts)

    def preview(self) -> Coverage:
        """Check the ranks; see `Source`. No values are read."""
        manifest, ranks = self.fit.manifest, Counter[str]()
        for part, _ in self.parts:
            _check_part(self.name, coverage_of(part))
            ranks.update({site.path: site.rank for site in coverage_of(part).adapted})
        pairs: dict[str, Pair] = {}
        for site in manifest.sites:
            if rank := ranks[site.path]:
                a, b = (zeros(site.shape(factor, rank), site.dtype) for factor in ("A", "B"))
                pairs[site.path] = a, b
        summed = replace(Adapter.of_pairs(self.name, pairs), targets=pairs.__contains__)
        return self.fit.preview(summed, strict=False)

    def read(self, keep: Keep) -> Fitted:
        """See `Source`."""
        manifest = self.fit.manifest
        with ExitStack() as stack:
            loaded = [(stack.enter_context(keep(part)), strength) for part, strength in self.parts]
            factors = [(_factors(part, manifest), strength) for part, strength in loaded]
            return self.fit.read(blend_adapters(self.name, factors), strict=False)


def _check_part(name: str, coverage: Coverage) -> None:
    """Refuse vectors: a norm is of the sum, and no sum of norms."""
    if any(site.vectors for site in coverage.sites):
        raise AdapterError(
            f"{coverage.source} has DoRA or biases, and {name} would be a blend or another "
            "strength of it, which are of A and B alone; take it as it is"
        )


def coverage_of(entry: Entry) -> Coverage:
    """Return what became of an adapter's tensors; its headers are read if it is not in memory.

    Raises:
        AdapterError: its files are needed, and cannot be read.
    """
    loading = entry.in_memory
    if loading is not None:
        return loading.result().fitted.coverage
    assert entry.source is not None  # what came in memory is forgotten when it leaves
    return entry.source.preview()


def _factors(loaded: Loaded, manifest: Manifest) -> Adapter:
    """The weights of a loaded adapter, up to the rank of each site: ranks of blends add up."""
    coverage, weights = loaded.fitted.coverage, {}
    ranks = {site.path: site.rank for site in coverage.sites}
    for name, tensor in loaded.fitted.tensors.items():
        site, factor = manifest.lora_bindings[name]
        axis = 1 if factor == "A" else 0
        weights[name] = weight_of(name, tensor).part(axis, 0, ranks[site.path])
    return Adapter(coverage.source, weights)
