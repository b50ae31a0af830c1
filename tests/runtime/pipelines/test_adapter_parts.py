"""One file for several components: who takes which tensor, and what nobody takes."""

from pathlib import Path

import numpy as np
import pytest
from support.adapters.diffusion.models import assert_same, engine
from support.adapters.diffusion.pipelines import LAST, LAYER, UNET, PipelineWriting, deltas_of
from support.adapters.diffusion.writing import PEFT, Writing
from support.fakes.fake_engine import write_peft
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.fitting.no_effect import NO_EFFECT
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.pipelines.adapters import PipelineAdapters
from trt_lora.runtime.store.store import AdapterStore

Held = dict[str, AdapterStore]


def peft(folder: Path, model: str, path: str, rank: int = 2) -> tuple[Path, Array]:
    """A directory by PEFT for one module, and its delta."""
    site = next(site for site in engine(model).sites if site.path == path)
    rng = np.random.default_rng(len(path))
    a, b = (rng.standard_normal(s, np.float32) for s in ((rank, site.k), (site.n, rank)))
    folder.parent.mkdir(exist_ok=True)
    tensors = {f"{path}.lora_A": a, f"{path}.lora_B": b}
    return write_peft(folder, tensors, target_modules=[path]), b.astype(np.float64) @ a


@pytest.mark.parametrize("kind", ["kohya", "diffusers"])
def test_a_file_with_prefixes_is_loaded_on_all_its_components_by_one_call(
    kind: str, held: Held, adapters: PipelineAdapters, tmp_path: Path
) -> None:
    writing = PipelineWriting()
    file = getattr(writing, kind)().last_layer().save(tmp_path / "a.safetensors")
    coverage = adapters.load("a", file)
    assert_same(deltas_of(adapters, held, "a"), writing.expected)
    assert not any(each.unexpected_keys for each in coverage.values())
    dead = [n for n, why in coverage["text_encoder"].ignored.items() if why == NO_EFFECT]
    assert sorted(dead) == [f"text_encoder.text_model.{LAST}.{end}" for end in PEFT]


def test_a_directory_by_peft_goes_to_the_component_that_it_fits(
    held: Held, adapters: PipelineAdapters, tmp_path: Path
) -> None:
    unet, delta = peft(tmp_path / "one", "sdxl", UNET)
    text, second = peft(tmp_path / "two", "clip_g", f"text_model.{LAYER}")
    assert adapters.load("unet", unet).keys() == {"unet"}
    assert adapters.load("text", text).keys() == {"text_encoder_2"}  # by its width alone
    assert_same(deltas_of(adapters, held, "unet"), {f"unet.{UNET}": delta})
    assert_same(deltas_of(adapters, held, "text"), {f"text_encoder_2.text_model.{LAYER}": second})


def test_directories_by_peft_named_like_the_components_are_one_adapter(
    held: Held, adapters: PipelineAdapters, tmp_path: Path
) -> None:
    _, unet = peft(tmp_path / "a" / "unet", "sdxl", UNET)
    _, text = peft(tmp_path / "a" / "text_encoder", "clip_l", LAYER)
    assert adapters.load("a", tmp_path / "a").keys() == {"unet", "text_encoder"}
    expected = {f"unet.{UNET}": unet, f"text_encoder.{LAYER}": text}
    assert_same(deltas_of(adapters, held, "a"), expected)
    peft(tmp_path / "a" / "transformer", "sdxl", UNET)
    with refused(AdapterError, "a/transformer (its component has no engine here)"):
        adapters.load("b", tmp_path / "a")
    assert adapters.names == ("a",)


def test_what_fits_two_components_is_refused_with_what_tells_them_apart(
    held: Held, tmp_path: Path
) -> None:
    both = {"text_encoder": held["text_encoder"], "text_encoder_3": held["text_encoder"]}
    adapters = PipelineAdapters(both)
    folder, delta = peft(tmp_path / "a", "clip_l", LAYER)
    with refused(AdapterError, "fits text_encoder and text_encoder_3", "load DIR"):
        adapters.load("a", folder)
    folder.rename(tmp_path / "text_encoder_3")
    assert adapters.load("a", tmp_path).keys() == {"text_encoder_3"}
    found = deltas_of(adapters, both, "a")
    assert_same(found, {f"text_encoder_3.{LAYER}": delta})


def test_a_tensor_that_no_component_takes_is_refused_or_listed(held: Held, tmp_path: Path) -> None:
    file = PipelineWriting().kohya().save(tmp_path / "a.safetensors")
    adapters = PipelineAdapters({"unet": held["unet"], "text_encoder": held["text_encoder"]})
    with refused(
        AdapterError,
        "3 of its tensors are taken by none of the engines of this pipeline (unet, text_encoder)",
        "it is of text_encoder_2, another component",
        "strict=False",
    ):
        adapters.load("a", file)
    assert adapters.names == ()
    coverage = adapters.load("a", file, strict=False)
    for each in coverage.values():
        assert len(each.unexpected_keys) == 3
        assert not each.unexpected_keys.keys() & each.ignored.keys()
        assert all("te2" in name for name in each.unexpected_keys)


def test_an_unknown_module_of_a_component_is_refused(
    adapters: PipelineAdapters, tmp_path: Path
) -> None:
    writing = PipelineWriting().kohya()
    writing.parts["unet"].add("lora_unet_mid_block_nothing", UNET)
    with refused(AdapterError, "lora_unet_mid_block_nothing", "has no site"):
        adapters.load("a", writing.save(tmp_path / "a.safetensors"))


def test_a_file_for_another_base_model_gets_one_sentence(
    adapters: PipelineAdapters, tmp_path: Path
) -> None:
    """SD1.5 has the same first text encoder, and a UNet of the same names."""
    whole, text = Writing(engine("sd15")), Writing(engine("clip_l"))
    for block in (0, 1):
        path = UNET.replace("blocks.1", f"blocks.{block}")
        whole.add(f"lora_unet_{path.replace('.', '_')}", path)
    text.add(f"lora_te_text_model_{LAYER.replace('.', '_')}", LAYER)
    whole.tensors |= text.tensors
    whole.metadata["ss_base_model_version"] = "sd_v1"
    with pytest.raises(AdapterError, match="is for another base model") as caught:
        adapters.load("a", whole.save(tmp_path / "a.safetensors"))
    assert str(caught.value).count("\n") == 0
    assert len(str(caught.value)) < 500
    assert adapters.names == ()


def test_what_is_no_adapter_is_refused_once(adapters: PipelineAdapters, tmp_path: Path) -> None:
    with refused(AdapterError, "nothing.safetensors cannot be opened"):
        adapters.load("a", tmp_path / "nothing.safetensors")
    with refused(AdapterError, "holds no tensors for the engines of this pipeline"):
        adapters.load("a", PipelineWriting().last_layer().save(tmp_path / "a.safetensors"))
