"""Grid of an engine's LoRA sites: a row for each module, a column for each layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from trt_lora.plugins.contract.sites import Site, layer_of, path_in_layer
from trt_lora.runtime.manifest import Manifest


@dataclass(frozen=True)
class GridCell:
    """One module of one layer."""

    site: Site | None  # None: no site
    rank: int = 0  # 0: a dummy

    @property
    def kind(self) -> str:
        """`none`, `dummy` or `bound`."""
        if self.site is None:
            return "none"
        return "bound" if self.rank else "dummy"


@dataclass(frozen=True)
class EngineGrid:
    """Cells by module and layer."""

    layers: tuple[int | None, ...]  # None: of no layer, such as the output projection
    rows: Mapping[str, tuple[GridCell, ...]]  # by the module's path in its layer


def site_grid(manifest: Manifest, ranks: Mapping[str, int]) -> EngineGrid:
    """Return the grid of an engine.

    Args:
        manifest: of the engine.
        ranks: of the sites that an adapter changes, by their path.
    """
    sites = {(path_in_layer(site.path), layer_of(site.path)): site for site in manifest.sites}
    modules = dict.fromkeys(module for module, _ in sites)
    found = {layer for _, layer in sites}
    numbers = sorted(layer for layer in found if layer is not None)
    layers = (*numbers, None) if None in found else tuple(numbers)
    return EngineGrid(
        layers,
        {
            module: tuple(_cell(sites.get((module, layer)), ranks) for layer in layers)
            for module in modules
        },
    )


def _cell(site: Site | None, ranks: Mapping[str, int]) -> GridCell:
    return GridCell(site, ranks.get(site.path, 0) if site else 0)
