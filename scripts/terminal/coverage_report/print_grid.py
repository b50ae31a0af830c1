"""Print a grid of sites with its legend: in colours on a terminal that has rich, else plain."""

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.terminal.coverage_report.site_grid import DUMMY, REFUSED, site_grid

_KINDS = 3  # of what is not bound, most
_STYLES = {DUMMY: "dim", REFUSED: "bold red"}


def print_grid(coverage: Coverage, manifest: Manifest) -> None:
    """Print what an adapter binds where, and the kinds of tensors that are not bound or ignored."""
    grid = site_grid(coverage, manifest)
    for label, glyphs in grid.lines():
        _print_glyphs(f"{label}  ", glyphs)
    print("   ".join(f"{glyph} {text}" for glyph, text in grid.legend.items()))
    for what, names in (("not bound", coverage.unexpected_keys), ("ignored", coverage.ignored)):
        for line in _kinds(names):
            print(f"{what}: {line}")


def _print_glyphs(label: str, glyphs: str) -> None:
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(label + glyphs)
        return
    from rich.console import Console
    from rich.text import Text

    runs = ("".join(run) for _, run in groupby(glyphs))
    styled = [(run, _STYLES.get(run[0], "green" if run[0].isalpha() else "")) for run in runs]
    Console().print(Text.assemble(label, *styled), soft_wrap=True)


def _kinds(reasons: Mapping[str, str]) -> Iterator[str]:
    """A line for tensors that are alike but for the layer, and how many kinds more there are."""
    kinds = Counter((_any_layer(name), _any_layer(reason)) for name, reason in reasons.items())
    for (name, reason), count in list(kinds.items())[:_KINDS]:
        yield f"{name} x {count}: {reason}" if count > 1 else f"{name}: {reason}"
    if len(kinds) > _KINDS:
        yield f"{len(kinds) - _KINDS} kinds more; --full lists every tensor"


def _any_layer(text: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", text)
