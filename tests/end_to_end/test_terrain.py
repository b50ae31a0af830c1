"""A trained diffusion model that is an ONNX file alone, and its adapters, against PEFT in torch."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from peft import PeftModel
from support.doc_blocks import ROOT

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.build import list_sites
from trt_lora.builder.progress import NoProgress
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.demo.terrain import __main__ as demo
from trt_lora.scripts.demo.terrain.graph_module import GraphModule
from trt_lora.scripts.demo.terrain.model import noise
from trt_lora.scripts.demo.terrain.train import adapted

pytestmark = pytest.mark.slow

ADAPTERS = {path.name: path for path in sorted((ROOT / demo.ADAPTERS).iterdir())}
CLOSE = 2e-5  # of heights from -1 to 1; the graph and torch differ by 5e-6 without LoRA


@dataclass(frozen=True)
class Terrain:
    """The engine with its adapters, and the same in torch."""

    file: Path
    engine: Engine
    peft: Any

    def heights(self, adapter: str | None = None, scale: float = 1.0, seed: int = 1) -> Array:
        return self.engine.run(noise(seed, 0.6), adapter=adapter, scale=scale)["denoised"]

    def expected(self, adapter: str, seed: int = 1) -> Array:
        self.peft.set_adapter(adapter)
        with torch.no_grad():
            inputs = {name: torch.from_numpy(each) for name, each in noise(seed, 0.6).items()}
            heights: Array = self.peft(**inputs).numpy()
        return heights


@pytest.fixture(scope="module")
def terrain(terrain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terrain]:
    folder = tmp_path_factory.mktemp("terrain") / "engine"
    build_engine(demo.config(terrain_model, folder), NoProgress())
    first, *others = ADAPTERS
    module: Any = GraphModule(onnx.load(terrain_model))
    peft: Any = PeftModel.from_pretrained(module, str(ADAPTERS[first]), first)
    for name in others:
        peft.load_adapter(str(ADAPTERS[name]), name)
    with ExitStack() as opened:
        engine = opened.enter_context(open_engine(folder))
        for name, path in ADAPTERS.items():
            engine.adapters.load(name, path)
        yield Terrain(terrain_model, engine, peft.eval())


def test_every_linear_and_convolution_of_a_point_is_a_site(terrain: Terrain) -> None:
    module = GraphModule(onnx.load(terrain.file))
    assert {site.path for site in terrain.engine.manifest.sites} == {*adapted(module)}
    assert len(terrain.engine.manifest.sites) == 59 + 84
    targets = GraphConfig(terrain.file, terrain.engine.directory, ("all-linear", "conv"))
    listing = list_sites(replace(targets, flavour="none", force=True))
    assert (len(listing.sites), listing.left_alone) == (59 + 84 + 112, ())


def test_without_an_adapter_it_is_the_file(terrain: Terrain) -> None:
    session = onnxruntime.InferenceSession(terrain.file)
    (expected,) = session.run(None, noise(1, 0.6))
    np.testing.assert_allclose(terrain.heights(), np.asarray(expected), atol=CLOSE)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_makes_the_land_that_peft_makes(terrain: Terrain, name: str) -> None:
    for seed in (1, 2):
        expected = terrain.expected(name, seed)
        np.testing.assert_allclose(terrain.heights(name, seed=seed), expected, atol=CLOSE)
    moved = np.abs(terrain.heights(name) - terrain.heights()).max()
    assert moved > 0.1, "an adapter that moves nothing shows nothing"


def test_valleys_are_hills_turned_over(terrain: Terrain) -> None:
    base, valleys = terrain.heights().ravel(), terrain.heights("valleys").ravel()
    assert np.corrcoef(base, valleys)[0, 1] < -0.8


def test_a_strength_and_a_blend_are_exact(terrain: Terrain) -> None:
    names, peft = [*ADAPTERS], terrain.peft
    peft.add_weighted_adapter(names, [0.5, 0.5], "blend", combination_type="cat")
    peft.add_weighted_adapter(names[:1], [0.7], "weak", combination_type="cat")
    terrain.engine.adapters.blend("both", dict.fromkeys(names, 0.5))
    np.testing.assert_allclose(terrain.heights("both"), terrain.expected("blend"), atol=CLOSE)
    weak = terrain.heights(names[0], scale=0.7)
    np.testing.assert_allclose(weak, terrain.expected("weak"), atol=CLOSE)


def test_switching_back_gives_the_same_bits(terrain: Terrain) -> None:
    first = [terrain.heights(name) for name in (None, *ADAPTERS)]
    again = [terrain.heights(name) for name in (None, *ADAPTERS)]
    assert all(map(np.array_equal, first, again))
