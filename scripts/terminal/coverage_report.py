"""An adapter's coverage: a grid of modules and layers, or a line for every tensor."""

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from trt_lora.plugins.contract.sites import VECTORS, parse_binding, split_at_layer
from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.terminal.printing import rich_console

DUMMY, REFUSED, OTHER = ".", "x", "+"
_LETTERS = string.ascii_lowercase.replace(REFUSED, "")  # a rank each; as capitals where shared
_COLUMNS = 60  # layers side by side; the others are below
_REFUSED_ROWS, _REFUSED_LAYERS = 12, 1000  # most that an adapter's own names can add to a grid


@dataclass(frozen=True)
class GlyphGrid:
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


def glyph_grid(coverage: Coverage, manifest: Manifest) -> GlyphGrid:
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
    return GlyphGrid(glyphs, {glyph: text for glyph, text in meanings.items() if glyph in found})


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


_KINDS = 3  # of what is not bound, most
_STYLES = {DUMMY: "dim", REFUSED: "bold red"}


def print_grid(coverage: Coverage, manifest: Manifest) -> None:
    """Print what an adapter binds where, and the kinds of tensors that are not bound or ignored."""
    grid = glyph_grid(coverage, manifest)
    for label, glyphs in grid.lines():
        _print_glyphs(f"{label}  ", glyphs)
    print("   ".join(f"{glyph} {text}" for glyph, text in grid.legend.items()))
    for what, names in (("not bound", coverage.unexpected_keys), ("ignored", coverage.ignored)):
        for line in _kinds(names):
            print(f"{what}: {line}")


def _print_glyphs(label: str, glyphs: str) -> None:
    if (console := rich_console()) is None:
        print(label + glyphs)
        return
    from rich.text import Text

    runs = ("".join(run) for _, run in groupby(glyphs))
    styled = [(run, _STYLES.get(run[0], "green" if run[0].isalpha() else "")) for run in runs]
    console.print(Text.assemble(label, *styled), soft_wrap=True)


def _kinds(reasons: Mapping[str, str]) -> Iterator[str]:
    """A line for tensors that are alike but for the layer, and how many kinds more there are."""
    kinds = Counter((_any_layer(name), _any_layer(reason)) for name, reason in reasons.items())
    for (name, reason), count in list(kinds.items())[:_KINDS]:
        yield f"{name} x {count}: {reason}" if count > 1 else f"{name}: {reason}"
    if len(kinds) > _KINDS:
        yield f"{len(kinds) - _KINDS} kinds more; --full lists every tensor"


def _any_layer(text: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", text)


def print_tensors(coverage: Coverage, manifest: Manifest) -> None:
    """Print what is bound to what, with ranks, scales and casts; what is not bound, and why."""
    for site in coverage.adapted:
        print(_site_line(site))
        vectors = (manifest.binding_names.binding(v, site.path) for v in VECTORS)
        for binding in (*manifest.binding_names.pair(site.path), *vectors):
            if not coverage.bindings.get(binding):
                continue
            print(f"  {binding} <- {', '.join(coverage.bindings[binding])}")
    for site in coverage.sites:
        if not site.rank:
            print(f"{site.path}: dummy")
    for name, reason in coverage.unexpected_keys.items():
        print(f"not bound: {name}: {reason}")
    for name, reason in coverage.ignored.items():
        print(f"ignored: {name}: {reason}")


def _site_line(site: SiteCoverage) -> str:
    scales = ", ".join(f"{scale:.6g}" for scale in site.scales)
    line = f"{site.path}: rank {site.rank}, scale {scales}, {site.nbytes} bytes"
    if (site.dtype,) != site.source_dtypes:
        line += f", {' and '.join(site.source_dtypes)} -> {site.dtype}"
    if site.rounding_error:
        line += f", rounded by at most {site.rounding_error:.2g}"
    return line + (f", {site.flushed} values became 0" if site.flushed else "")
