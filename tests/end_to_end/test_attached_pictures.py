"""A batch of pictures with different adapters, on a pipeline of diffusers with slots."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.whole_pipelines import save_adapter, save_pipeline
from torch import Tensor

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import open_pipeline
from trt_lora.scripts import build_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

CLOSE = 1e-5  # of the largest latent
PROMPTS = ["a cat", "a dog", "a cat"]
PICTURES = ["style", None, "face"]


def latents(pipe: Any, **options: Any) -> Tensor:
    given = {"prompt": PROMPTS, "num_inference_steps": 2, "height": 32, "width": 64} | options
    found: Tensor = pipe(**given, output_type="latent", generator=torch.manual_seed(3))[0]
    return found


def saved(kind: str, components: list[str], folder: Path) -> Any:
    """A pipeline of diffusers with two adapters, and its engines with two slots."""
    pipe = save_pipeline(kind, folder / "model")
    for seed, name in enumerate(("style", "face")):
        save_adapter(pipe, folder / f"{name}.safetensors", seed, components)
    for name in ("style", "face"):
        pipe.load_lora_weights(folder, weight_name=f"{name}.safetensors", adapter_name=name)
    options = "--lora-target-modules all-linear --max-lora-rank 16 --dtype float32 --flavour none"
    command = ["--model", str(folder / "model"), "--output", str(folder / "engines")]
    command += ["--components", *components, "--max-loras", "2", *options.split()]
    build_engine.main(command)
    return pipe


@pytest.mark.parametrize(
    ("kind", "components"),
    [("StableDiffusion", ["unet", "text_encoder"]), ("Flux", ["transformer"])],
)
def test_each_picture_is_the_one_that_diffusers_makes_with_its_adapter_alone(
    kind: str, components: list[str], tmp_path: Path
) -> None:
    """With guidance a model of StableDiffusion has two rows a picture; Flux has shared inputs."""
    theirs = saved(kind, components, tmp_path)
    with open_pipeline(tmp_path / "engines") as engines:
        pipe = engines.attach(theirs)
        for name in ("style", "face"):
            pipe.load_lora_weights(tmp_path / f"{name}.safetensors", adapter_name=name)
        pipe.set_adapters_of_pictures(PICTURES)
        assert pipe.get_active_adapters() == ["style", "face"]
        found = latents(pipe)
        for picture, adapter in enumerate(PICTURES):
            theirs.set_adapters(adapter or "style", float(adapter is not None))
            expected = latents(theirs)[picture]
            assert float((expected - found[picture]).abs().max() / expected.abs().max()) < CLOSE
        with pytest.raises(ConfigError, match=r"3 pictures .* 2 rows at a scale of 1\.0; give as"):
            latents(pipe, prompt=PROMPTS[:2])
        for wrong in ("style", [], [None, "stile"]):
            with pytest.raises(ConfigError, match=r"pass a list of one a picture|called 'stile'"):
                pipe.set_adapters_of_pictures(wrong)
        pipe.disable_lora()
        base = latents(pipe)
        assert torch.equal(base[1], found[1])
        pipe.enable_lora()
        pipe.delete_adapters("face")
        rest = latents(pipe)
        assert torch.equal(rest[0], found[0])
        assert torch.equal(rest[2], base[2])
        pipe.set_adapters("style")
        assert torch.equal(latents(pipe)[0], found[0])
