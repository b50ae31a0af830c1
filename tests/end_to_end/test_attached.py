"""Pipelines of diffusers on engines, against the same pipelines with PEFT's layers."""

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.doc_blocks import Block, blocks
from support.models.whole_pipelines import save_adapter, save_pipeline
from support.page_checkout import run_in
from torch import Tensor

from trt_lora.plugins.errors import ConfigError, LoRAError, StateError
from trt_lora.runtime import PipelineEngines, load_adapter, open_pipeline
from trt_lora.runtime import save_adapter as save_adapter_as
from trt_lora.runtime.pipelines.attached.block_strengths import block_strengths

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CLOSE = 1e-5  # of the largest latent
# Which components become engines; the others stay torch's. The page builds all of SDXL's.
BUILT = {
    "StableDiffusion": "unet text_encoder",
    "StableDiffusionXL": "",
    "StableDiffusion3": "transformer text_encoder",
    "Flux": "transformer text_encoder text_encoder_2",
    "Wan": "transformer text_encoder",
}
OF_WAN = {"num_frames": 5, "max_sequence_length": 20}  # a video, and all that its tokenizer has
PAGE = [block for block in blocks("docs/pictures.md") if block.language in ("bash", "python")]


@dataclass(frozen=True)
class Both:
    """A pipeline of diffusers, and what is made of it, with the same adapters."""

    torch: Any
    ours: Any
    engines: PipelineEngines
    folder: Path  # of sdxl/, engines/sdxl/, style.safetensors and face.safetensors

    @property
    def denoiser(self) -> str:
        return "unet" if "unet" in self.engines.engines else "transformer"

    def set(self, *weights: Any) -> None:
        """Of style and face, as many as there are weights."""
        for pipe in (self.torch, self.ours):
            pipe.set_adapters(["style", "face"][: len(weights)], [*weights])

    def latents(self, **options: Any) -> Tensor:
        """Of ours, which are those of diffusers."""
        expected, found = latents(self.torch, **options), latents(self.ours, **options)
        assert float((expected - found).abs().max() / expected.abs().max()) < CLOSE
        return found


def latents(pipe: Any, **options: Any) -> Tensor:
    given = {"prompt": "a cat", "num_inference_steps": 3, "guidance_scale": 5.0} | options
    given |= {"height": 32, "width": 64, "output_type": "latent"}
    if "transformer_2" in pipe.components:
        if count := given.pop("num_images_per_prompt", None):
            given["num_videos_per_prompt"] = count
        given |= OF_WAN
    found: Tensor = pipe(**given, generator=torch.manual_seed(3))[0]
    return found


def make(kind: str, folder: Path, opened: ExitStack) -> Both:
    """Build the engines of a pipeline as its users do, and load two adapters into both."""
    pipe, components = save_pipeline(kind, folder / "sdxl"), BUILT[kind]
    command = PAGE[0].text.replace("--dtype", f"--components {components} --dtype")
    run_in(folder, Block("bash", command if components else PAGE[0].text))
    engines = opened.enter_context(open_pipeline(folder / "engines/sdxl"))
    taken = [name for name in type(pipe)._lora_loadable_modules if name in engines.engines]
    save_adapter(pipe, folder / "style.safetensors", 0, taken)
    save_adapter(pipe, folder / "face.safetensors", 1, taken[::2])
    ours = engines.attach(pipe)
    for each in (pipe, ours):
        for name in ("style", "face"):
            each.load_lora_weights(folder, weight_name=f"{name}.safetensors", adapter_name=name)
    return Both(pipe, ours, engines, folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Both]]:
    """Each pipeline once."""
    with ExitStack() as opened:
        yield cache(lambda kind: make(kind, tmp_path_factory.mktemp("pipeline"), opened))


@pytest.fixture(params=BUILT)
def both(request: pytest.FixtureRequest, made: Callable[[str], Both]) -> Both:
    return made(request.param)


@pytest.fixture
def xl(made: Callable[[str], Both]) -> Both:
    return made("StableDiffusionXL")


def test_it_is_a_pipeline_of_the_class_which_shares_what_is_no_engine(both: Both) -> None:
    assert isinstance(both.ours, type(both.torch))
    assert both.ours.scheduler is both.torch.scheduler
    assert both.ours.get_list_adapters() == both.torch.get_list_adapters()
    assert both.ours.get_active_adapters() == ["face"], "what was loaded last"
    for name, model in both.torch.components.items():
        assert (getattr(both.ours, name) is model) == (name not in both.engines.engines)
    assert not hasattr(type(both.torch), "engine_lora")


def test_latents_are_those_of_diffusers(both: Both) -> None:
    both.set(1.0)
    style = both.latents()
    for weights in (
        (0.6,),
        (0.7, 0.3),
        ({both.denoiser: 0.5, "text_encoder": 0.0}, -1.2),
        (0.0, 1.0),
        (1.0,),
    ):
        both.set(*weights)
        again = both.latents()
        assert torch.equal(again, style) == (weights == (1.0,)), "A, B, A: bit by bit"
    both.latents(num_images_per_prompt=2)
    both.latents(guidance_scale=1.0)


def test_no_adapter_is_the_base_model_until_it_is_enabled_again(both: Both) -> None:
    both.set(0.5)
    half = latents(both.ours)
    for pipe in (both.torch, both.ours):
        pipe.disable_lora()
    base = both.latents()
    both.set(1.0, 0.5)
    assert torch.equal(both.latents(), base)
    for pipe in (both.torch, both.ours):
        pipe.enable_lora()
    both.set(0.5)
    assert torch.equal(both.latents(), half)
    assert not torch.equal(half, base)


def test_strengths_change_between_two_steps(both: Both) -> None:
    def ramp(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
        pipe.set_adapters(["style", "face"], [0.3 * step, {both.denoiser: 1 - 0.4 * step}])
        return given

    both.set(1.0)
    steady = both.latents()
    assert not torch.equal(both.latents(callback_on_step_end=ramp), steady)


def test_a_scale_of_one_call_multiplies_every_strength(both: Both) -> None:
    arguments = inspect.signature(type(both.torch).__call__).parameters
    (name,) = (name for name in arguments if name.endswith("attention_kwargs"))
    both.set(0.8, {both.denoiser: 0.5})
    before = both.latents()
    scaled = both.latents(**{name: {"scale": 0.5}})
    assert torch.equal(both.latents(), before)
    assert not torch.equal(scaled, before)
    with pytest.raises(ConfigError, match=f"{name} has ip_adapter_masks; an engine takes 'scale'"):
        latents(both.ours, **{name: {"ip_adapter_masks": []}})


def test_two_pipelines_on_the_same_engines_have_active_adapters_of_their_own(both: Both) -> None:
    other = both.engines.attach(both.torch)
    both.set(0.5)
    half = latents(both.ours)
    other.set_adapters(["style", "face"], [0.2, 0.9])
    found = latents(other)
    assert torch.equal(latents(both.ours), half)
    both.set(0.2, 0.9)
    assert torch.equal(both.latents(), found)
    assert not torch.equal(half, found)
    third = both.engines.attach(other)
    assert third.get_active_adapters() == []
    assert type(third).__mro__[1:] == type(other).__mro__


def test_strengths_by_block_are_those_of_diffusers(xl: Both) -> None:
    """Blocks without attention have 1, and ResNet layers what the attention behind them has."""
    for by_block in (
        {"down": 0.9, "mid": [0.6], "up": {"block_0": [0.4, -0.8]}},
        {"down": {"block_1": 0.3}},
        {"up": [0.5, 2.0]},
    ):
        layers = {"text_model.encoder.layers.0": 0.3}
        xl.set({"unet": by_block, "text_encoder": 0.5, "text_encoder_2": layers})
        xl.latents()
        xl.latents(cross_attention_kwargs={"scale": 0.5})
    two = block_strengths(
        {"up": 0.5},
        {"down_block_types": (), "up_block_types": ("AttnUp", "Up"), "layers_per_block": (1, 2)},
        ["up_blocks.0.attentions.2.proj_in", "up_blocks.1.resnets.0.conv1"],
    )
    assert two == {"": 1.0, **dict.fromkeys(TWO, 0.5)}


TWO = ("up_blocks.0.attentions.2",)  # of a block of two layers, and one more


def test_texts_may_be_given_and_are_encoded_at_a_scale(xl: Both) -> None:
    xl.set(0.8)
    names = (
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    )
    with torch.no_grad():
        texts = [pipe.encode_prompt("a dog", lora_scale=0.5) for pipe in (xl.torch, xl.ours)]
    for expected, found in zip(*texts, strict=True):
        assert float((expected - found).abs().max()) < CLOSE
    xl.latents(prompt=None, **dict(zip(names, texts[0], strict=True)))


def test_what_fails_is_a_value_error_and_changes_nothing(xl: Both) -> None:
    """Each of these raises a ValueError in diffusers, or is ignored there."""
    pipe, folder = xl.ours, xl.folder
    xl.set(0.6)
    before = latents(pipe)
    unet = {"down": 1.0}
    wrong: dict[str, Callable[[], Any]] = {
        "no adapter is called 'stile'; loaded: style, face; did": lambda: pipe.set_adapters(
            "stile"
        ),
        "2 adapters .* have 1 weights": lambda: pipe.set_adapters(["style", "face"], [1.0]),
        "0 adapters": lambda: pipe.set_adapters([]),
        "'unett' is none of the comp.*did": lambda: pipe.set_adapters("face", {"unett": 1.0}),
        "'left' is none of adapter_w": lambda: set_blocks(pipe, unet | {"left": 1.0}),
        "'block_0' is none of down": lambda: set_blocks(pipe, {"down": {"block_0": 1.0}}),
        "up.block_0 has 3 strengths; exp.* 2": lambda: set_blocks(pipe, {"up": [1.0, 1.0, 1.0]}),
        "mid has 2 strengths": lambda: set_blocks(pipe, {"mid": [1, 2]}),
        "strength of mid is 'x'": lambda: set_blocks(pipe, {"mid": "x"}),
        "strength of unet is 'x'": lambda: pipe.set_adapters("face", "x"),
        "no module .* begins with, 'layers'": lambda: pipe.set_adapters(
            "style", {"text_encoder": {"layers": 0.5}}
        ),
        "'style' .*(taken|already)": lambda: pipe.load_lora_weights(
            folder / "face.safetensors", "style"
        ),
        "nothing is no file or folder": lambda: pipe.load_lora_weights("nothing"),
        "absent.safetensors": lambda: pipe.load_lora_weights(
            folder, weight_name="absent.safetensors"
        ),
        "was given a state dict; write it": lambda: pipe.load_lora_weights({}),
        "'vae' is none": lambda: pipe.fuse_lora(components=["vae"]),
        "components is empty": lambda: pipe.unfuse_lora(components=[]),
        "fuse_lora.lora_scale=0.5": lambda: pipe.fuse_lora(lora_scale=0.5),
        "adapter_names=.'face'": lambda: pipe.fuse_lora(adapter_names=["face"]),
        "no adapter is called 'x'": lambda: pipe.delete_adapters("x"),
        "adapters are inputs": lambda: pipe.set_lora_device(["style"], "cpu"),
        "target_rank is 99": lambda: pipe.enable_lora_hotswap(target_rank=99),
    }
    for match, call in wrong.items():
        with pytest.raises(ValueError, match=match) as caught:
            call()
        assert isinstance(caught.value, LoRAError)
    assert pipe.get_active_adapters() == ["style"]
    assert torch.equal(latents(pipe), before)


def set_blocks(pipe: Any, by_block: Any) -> None:
    pipe.set_adapters("face", {"unet": by_block})


def test_what_an_engine_does_not_take_is_refused_by_name(
    xl: Both, made: Callable[[str], Both]
) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "timestep_cond is given, and is no input": {"timestep_cond": torch.zeros(1, 4)},
        "mid_block_additional_residual": {"mid_block_additional_residual": torch.zeros(1)},
        "image_embeds is given": {"added_cond_kwargs": {"image_embeds": torch.zeros(1)}},
        "takes text_embeds, time_ids, which": {},
    }
    for match, options in wrong.items():
        with pytest.raises(ConfigError, match=match):
            xl.ours.unet(torch.zeros(1, 4, 8, 8), 1.0, torch.zeros(1, 20, 32), **options)
    ids = torch.zeros(1, 20, dtype=torch.long)
    with pytest.raises(ConfigError, match="attention_mask is given, and is no input"):
        xl.ours.text_encoder(ids, attention_mask=torch.eye(20)[:1])
    with pytest.raises(ConfigError, match=r"hidden_states\[-3\] is none"):
        latents(xl.ours, clip_skip=1)
    with pytest.raises(ConfigError, match="last layer's states alone; leave out clip_skip"):
        latents(made("StableDiffusion").ours, clip_skip=1)
    with pytest.raises(AttributeError, match=r"last_hidden_state.shape: .* reads other outputs"):
        xl.ours.text_encoder(ids, torch.ones(1, 20)).last_hidden_state.shape  # noqa: B018
    with pytest.raises(TypeError, match="no_such"):
        xl.ours.unet(torch.zeros(1), 1.0, torch.zeros(1), no_such=1)


@torch.no_grad()
def test_models_answer_as_they_do_in_torch(xl: Both) -> None:
    ids = torch.arange(40).reshape(2, 20)
    xl.set(0.5)
    for name in ("text_encoder", "text_encoder_2"):
        ours, theirs = (
            getattr(pipe, name)(ids, output_hidden_states=True) for pipe in (xl.ours, xl.torch)
        )
        pairs = [(ours.hidden_states[-2], theirs.hidden_states[-2])]
        if name == "text_encoder_2":
            pairs += [(ours.text_embeds, theirs.text_embeds), (ours[0], theirs[0])]
        for found, expected in pairs:
            assert float((found - expected).abs().max()) < CLOSE
    inputs = torch.ones(1, 4, 8, 8), torch.tensor(500), torch.ones(1, 20, 32)
    added = {"text_embeds": torch.ones(1, 24), "time_ids": torch.ones(1, 6)}
    with xl.ours.unet.cache_context("cond"):
        whole = xl.ours.unet(*inputs, added_cond_kwargs=added)
    (one,) = xl.ours.unet(*inputs, added_cond_kwargs=added, return_dict=False)
    assert torch.equal(whole.sample, one)
    expected = xl.torch.unet(*inputs, added_cond_kwargs=added).sample
    assert float((one - expected).abs().max() / expected.abs().max()) < CLOSE


def test_adapters_are_loaded_unloaded_and_fused_as_in_diffusers(xl: Both) -> None:
    pipe = xl.engines.attach(xl.torch)
    base = latents(pipe)
    pipe.load_lora_weights(xl.folder / "style.safetensors")
    assert pipe.get_active_adapters() == ["default_0"]
    xl.set(1.0)
    style = latents(xl.ours)
    assert torch.equal(latents(pipe), style)
    pipe.fuse_lora()
    assert pipe.num_fused_loras == 1
    with pytest.raises(StateError, match="default_0 was fused"):
        pipe.unload_lora_weights()
    pipe.unfuse_lora()
    pipe.load_lora_weights(xl.folder / "face.safetensors", "default_0", hotswap=True)
    xl.set(0.0, 1.0)
    face = xl.latents()
    assert float((latents(pipe) - face).abs().max() / face.abs().max()) < CLOSE
    assert not torch.allclose(face, style)
    pipe.set_adapters(["default_0", "style"], [0.5, 0.5])
    pipe.delete_adapters("default_0")
    assert pipe.get_active_adapters() == ["style"]
    xl.set(0.5)
    assert torch.equal(latents(pipe), latents(xl.ours))
    pipe.disable_lora()
    pipe.unload_lora_weights()
    assert torch.equal(latents(pipe), base)
    assert "style" in xl.engines.adapters.names, "which another pipeline has loaded"


def test_a_folder_by_peft_is_an_adapter_too(xl: Both) -> None:
    unet = load_adapter(xl.folder / "style.safetensors", xl.engines.engines["unet"].manifest)
    save_adapter_as(unet, xl.folder / "peft", "peft")
    pipe = xl.engines.attach(xl.torch)
    pipe.load_lora_weights(xl.folder / "peft")
    found = latents(pipe)
    xl.set({"unet": 1.0, "text_encoder": 0.0, "text_encoder_2": 0.0})
    expected = xl.latents()
    assert float((found - expected).abs().max() / expected.abs().max()) < CLOSE
    before = len(xl.engines.adapters.names)
    pipe.set_adapters("default_0", 0.5)
    assert len(xl.engines.adapters.names) == before + 1
    del pipe
    gc.collect()
    assert len(xl.engines.adapters.names) == before, "what it summed is gone with it"


def test_a_pipeline_without_the_component_is_refused(xl: Both) -> None:
    other = SimpleNamespace(components={"unet": object(), "vae": object(), "text_encoder": None})
    with pytest.raises(ConfigError, match="no component 'text_encoder'; it has: unet, vae"):
        xl.engines.attach(other)


def test_the_page_runs(xl: Both) -> None:
    build, run = PAGE
    assert build.language == "bash"
    run_in(xl.folder, run)
