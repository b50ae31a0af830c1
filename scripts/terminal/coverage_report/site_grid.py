"""Grid of an engine's sites, a row a module and a column a layer: what an adapter binds where."""

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trt_lora.plugins.contract.sites import parse_binding, split_at_layer
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.manifest import Manifest

DUMMY, REFUSED, OTHER = ".", "x", "+"
_LETTERS = string.ascii_lowercase.replace(REFUSED, "")  # a rank each; as capitals where shared
_COLUMNS = 60  # layers side by side; the others are below
_REFUSED_ROWS, _REFUSED_LAYERS = 12, 1000  # most that an adapter's own names can add to a grid


@dataclass(frozen=True)
class SiteGrid:
    """A glyph for every site, and what the glyphs mean."""

    glyphs: Mapping[str, str]  # by the path of the site
    legend: Mapping[str, str]

    def lines(self) -> list[tuple[str, str]]:
        """Return label and glyphs line by line; a header has the numbers of the layers."""
        blocks: dict[str, dict[str, dict[int, str]]] = {}
        outside: list[tuple[str, str]] = []
        for path, glyph in self.glyphs.items():
            stem, layer, module = split_at_layer(path)
            if layer is None:
                outside.append((path, glyph))
            else:
                blocks.setdefault(stem, {}).setdefault(module, {})[layer] = glyph
        rows = [row for stem, cells in blocks.items() for row in _block(stem, cells)] + outside
        width = max((len(label) for label, _ in rows), default=0)
        return [(label.ljust(width), glyphs) for label, glyphs in rows]


def _block(stem: str, rows: Mapping[str, Mapping[int, str]]) -> Iterator[tuple[str, str]]:
    layers = {layer for cells in rows.values() for layer in cells}
    for first in sorted({layer - layer % _COLUMNS for layer in layers}):
        columns = range(first, min(first + _COLUMNS, max(layers) + 1))
        yield stem, "".join(f"{layer:<10}" for layer in columns[::10]).rstrip()
        for module, cells in rows.items():
            yield module, "".join(cells.get(layer, " ") for layer in columns).rstrip()


def site_grid(coverage: Coverage, manifest: Manifest) -> SiteGrid:
    """Return the grid of an adapter in an engine, with the modules that the engine refuses."""
    ranks = sorted({site.rank for site in coverage.adapted})
    letters = {rank: _LETTERS[i] if i < len(_LETTERS) else OTHER for i, rank in enumerate(ranks)}
    glyphs = {site.path: letters.get(site.rank, DUMMY) for site in coverage.sites}
    glyphs |= {path: glyphs[path].upper() for path in _shared_sites(coverage, manifest)}
    glyphs |= dict.fromkeys(_refused_paths(coverage), REFUSED)
    meanings = {letter: f"rank {rank}" for rank, letter in letters.items()}
    meanings |= {letter.upper(): f"{rank}, tensors shared" for letter, rank in meanings.items()}
    meanings |= {OTHER: "another rank", DUMMY: "no tensor: a dummy", REFUSED: "refused"}
    found = set(glyphs.values())
    return SiteGrid(glyphs, {glyph: text for glyph, text in meanings.items() if glyph in found})


def _shared_sites(coverage: Coverage, manifest: Manifest) -> set[str]:
    """The sites that take a tensor which another site takes, too: parts of a fused module."""
    shared: set[str] = set()
    for bindings in coverage.bound.values():
        paths = {manifest.lora_bindings[binding][0].path for binding in bindings}
        shared |= paths if len(paths) > 1 else set()
    return shared


def _refused_paths(coverage: Coverage) -> Iterator[str]:
    """The modules of refused tensors, where a name says which and there are layers like it."""
    stems = {split_at_layer(site.path)[0] for site in coverage.sites}
    modules: set[str] = set()
    for name in coverage.unexpected_keys:
        found = parse_binding(name.removeprefix("base_model.model."))
        stem, layer, module = split_at_layer(found[1] if found else "")
        if found and layer is not None and layer < _REFUSED_LAYERS and stem in stems:
            modules |= {module} if len(modules) < _REFUSED_ROWS and module.isprintable() else set()
            if module in modules:
                yield found[1]
