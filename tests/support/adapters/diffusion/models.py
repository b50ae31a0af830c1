"""Modules of real diffusion models, by `support/data/diffusion`, as engines of small widths."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import Manifest

Deltas = dict[str, npt.NDArray[np.float64]]  # path -> what is added to its weight [n, k]

_DATA = Path(__file__).parents[2] / "data" / "diffusion" / "names.json.gz"


@cache
def _names() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(_DATA.read_bytes()))
    return found


def sizes(model: str) -> dict[str, tuple[int, int]]:
    """K and n of every linear and convolution of a real model, by its path in diffusers."""
    return {path: (k, n) for path, k, n in _names()["paths"][model]}


def original_names(model: str) -> dict[str, dict[str, list[int]]]:
    """What diffusers' converters make of original names: paths, and their first and last row."""
    found: dict[str, dict[str, list[int]]] = _names()["original"][model]
    return found


@cache
def engine(model: str, rank: int = 16) -> Manifest:
    """All of its modules take LoRA, in float32; 64 of the model's values are one here."""
    sites = [Site(p, _small(k), _small(n), "float32") for p, (k, n) in sizes(model).items()]
    return replace(make_manifest(), sites=tuple(sites), max_lora_rank=rank)


def engine_of(model: str, takes: Callable[[str], bool], **changes: Any) -> Manifest:
    """Fewer of its modules take LoRA."""
    whole = engine(model)
    sites = tuple(site for site in whole.sites if takes(site.path))
    return replace(whole, sites=sites, **changes)


def _small(size: int) -> int:
    return size // 64 if size > 64 and size % 64 == 0 else size


def deltas(file: Path, manifest: Manifest, component: str = "") -> Deltas:
    """What an engine adds with the adapter that is in a file, in float64."""
    fitted = fit_adapter(load_adapter(file, manifest, component=component), manifest)
    found = {}
    for site in fitted.coverage.adapted:
        names = manifest.binding_names.pair(site.path)
        a, b = (fitted.tensors[name].numpy().astype(np.float64) for name in names)
        found[site.path] = (a @ b).T
    return found


def assert_same(found: Deltas, expected: Deltas) -> None:
    """The same modules, and the same deltas but for float32."""
    assert found.keys() == expected.keys()
    for path, delta in expected.items():
        assert np.abs(found[path] - delta).max() <= 1e-6 * np.abs(delta).max(), path
