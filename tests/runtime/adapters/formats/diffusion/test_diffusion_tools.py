"""Files that diffusers and LyCORIS have written: what they add by their own arithmetic."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.adapters.diffusion.models import Deltas, assert_same, deltas
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import Manifest

DATA = Path(__file__).parents[4] / "support" / "data" / "diffusion"
RANKS = {"locon": 3, "locon_tucker": 3, "loha": 9, "loha_tucker": 9, "lokr": 4, "lokr_both": 1,
         "lokr_tucker": 4, "lokr_full": 16}  # fmt: skip


def engine_for(expected: Deltas, component: str = "") -> Manifest:
    sites = (Site(path, d.shape[1], d.shape[0], "float32") for path, d in expected.items())
    return replace(make_manifest(), sites=tuple(sites), component=component)


def expected_of(name: str) -> Deltas:
    found = load_file(DATA / f"{name}.expected.safetensors")
    return {path: delta.astype(np.float64) for path, delta in found.items()}


@pytest.mark.parametrize("name", RANKS)
def test_lycoris_adds_as_much_in_its_forward(name: str) -> None:
    expected = expected_of(name)
    assert_same(deltas(DATA / f"{name}.safetensors", engine_for(expected)), expected)


@pytest.mark.parametrize("name", RANKS)
def test_a_product_has_the_rank_of_its_kind(name: str) -> None:
    manifest = engine_for(expected_of(name))
    coverage = preview_adapter(load_adapter(DATA / f"{name}.safetensors", manifest), manifest)
    assert {site.path: site.rank for site in coverage.sites}["lin"] == RANKS[name]


@pytest.mark.parametrize("component", ["unet", "text_encoder"])
@pytest.mark.parametrize("is_said", [True, False])
def test_diffusers_file_of_two_components_is_read_for_each(component: str, is_said: bool) -> None:
    expected = {
        path.removeprefix(f"{component}."): delta
        for path, delta in expected_of("diffusers").items()
        if path.startswith(f"{component}.")
    }
    manifest = engine_for(expected, component if is_said else "")
    assert_same(deltas(DATA / "diffusers.safetensors", manifest), expected)
