"""ComfyUI's stand-ins over two small pipelines: each a MODEL, SDXL's with a CLIP."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fakes.fake_comfy import comfyui
from support.models.small_pipelines import RANK, WIDTH, Model, build_pipeline
from torch import Tensor

CLOSE = 2e-6  # of the largest value


@dataclass(frozen=True)
class Loaded:
    """What the engine loader gives, and the same in torch."""

    models: Mapping[str, Model]
    model: Any
    clip: Any
    latent: Tensor
    asked: dict[str, Any] = field(default_factory=dict)  # of apply_model beside them

    def run(self, patcher: Any) -> Tensor:
        """One step as a sampler does it."""
        patcher.partially_load()
        found: Tensor = patcher.model.apply_model(
            self.latent, torch.tensor([0.9, 0.2]), **self.asked
        )
        return found


@dataclass(frozen=True)
class Comfy:
    """The nodes, and what they have loaded."""

    nodes: Any
    models: Path
    sdxl: Loaded
    flux: Loaded


@pytest.fixture(scope="package")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comfy]:
    models = tmp_path_factory.mktemp("models")
    (models / "loras").mkdir()
    torch.manual_seed(7)
    text = {"context": torch.rand(2, 5, WIDTH)}
    sizes = {"y": torch.cat([torch.rand(2, WIDTH), torch.randint(0, 1024, (2, 6)) / 512], 1)}
    pooled = {"y": torch.rand(2, WIDTH), "guidance": torch.full((2,), 3.5)}
    with comfyui(models) as nodes:
        loader, found = nodes.EngineLoader(), []
        for kind, asked in (("SDXL", sizes), ("Flux", pooled)):
            torches = build_pipeline(models / "trt_lora" / kind.lower(), kind)
            model, clip = loader.load(kind.lower())
            found.append(Loaded(torches, model, clip, torch.rand(2, 4, 4, 6), text | asked))
        yield Comfy(nodes, models, *found)


def factors(k: int, n: int, rank: int = 4) -> dict[str, Tensor]:
    """LoRA of a module in kohya's names."""
    assert rank <= RANK
    down, up = torch.randn(rank, k) / 4, torch.randn(n, rank) / 8
    return {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(2.0)}


def delta(parts: Mapping[str, Tensor]) -> Tensor:
    """Scale * B A, in float64."""
    down, up = parts["lora_down.weight"].double(), parts["lora_up.weight"].double()
    return up @ down * (2.0 / len(down))


def by_rows(whole: Tensor, paths: Iterable[str], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The rows of each path, whose outputs follow one another."""
    found, start = {}, 0
    for path in paths:
        found[path] = whole[start : start + sizes[path]]
        start += sizes[path]
    return found


def assert_close(found: Tensor, expected: Tensor) -> None:
    """But for float32."""
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= CLOSE * max(1.0, expected.abs().max().item())
