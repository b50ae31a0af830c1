"""Files with adapters of several components, and modules without effect."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.adapters.diffusion.file_kinds import flat
from support.adapters.diffusion.models import Deltas, assert_same, deltas, engine
from support.adapters.diffusion.writing import KOHYA, PEFT, Writing
from support.fakes.fake_engine import write_peft
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.runtime.adapters.fitting.no_effect import NO_EFFECT
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import Manifest

UNET = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
LAYER, LAST = "encoder.layers.3.mlp.fc1", "encoder.layers.11.mlp.fc1"
T5 = "encoder.block.3.layer.0.SelfAttention.q"


def sdxl_file(folder: Path) -> tuple[Path, dict[str, Deltas]]:
    """Kohya's file of UNet and both text encoders; what it says by model."""
    parts = {model: Writing(engine(model)) for model in ("sdxl", "clip_l", "clip_g")}
    parts["sdxl"].add(f"lora_unet_{flat(UNET)}", UNET)
    parts["clip_l"].add(f"lora_te1_text_model_{flat(LAYER)}", LAYER)
    parts["clip_g"].add(f"lora_te2_text_model_{flat(LAYER)}", f"text_model.{LAYER}")
    whole = parts["sdxl"]
    for part in parts.values():
        whole.tensors |= part.tensors
    expected = {model: part.expected for model, part in parts.items()}
    return whole.save(folder / "a.safetensors"), expected


def coverage_of(file: Path, manifest: Manifest) -> Coverage:
    return preview_adapter(load_adapter(file, manifest), manifest)


@pytest.mark.parametrize("model", ["sdxl", "clip_l", "clip_g"])
def test_the_part_whose_prefix_and_widths_match_is_read(tmp_path: Path, model: str) -> None:
    file, expected = sdxl_file(tmp_path)
    assert_same(deltas(file, engine(model)), expected[model])


def test_what_is_of_other_components_is_listed(tmp_path: Path) -> None:
    file, _ = sdxl_file(tmp_path)
    coverage = coverage_of(file, engine("sdxl"))
    assert set(coverage.ignored.values()) == {
        f"it is of {name}, another component" for name in ("text_encoder", "text_encoder_2")
    }
    assert len(coverage.ignored) == 4


def test_equal_text_encoders_have_to_be_told_apart(tmp_path: Path) -> None:
    writing, manifest = Writing(engine("clip_l")), engine("clip_l")
    for number in (1, 2):
        writing.add(f"lora_te{number}_text_model_{flat(LAYER)}", LAYER)
    file = writing.save(tmp_path / "a.safetensors")
    with refused(AdapterError, file, "text_encoder, text_encoder_2", "--component"):
        load_adapter(file, manifest)
    second = writing.expected  # which was written last
    assert_same(deltas(file, manifest, "text_encoder_2"), second)
    assert_same(deltas(file, replace(manifest, component="text_encoder_2")), second)
    first = deltas(file, replace(manifest, component="text_encoder_2"), "text_encoder")
    assert np.abs(first[LAYER] - second[LAYER]).max() > 0.1  # what is asked for goes first


def test_an_unknown_component_is_refused(tmp_path: Path) -> None:
    file, _ = sdxl_file(tmp_path)
    with pytest.raises(ConfigError, match="text_encoder_3"):
        load_adapter(file, engine("sdxl"), component="vae")


@pytest.mark.parametrize(
    ("component", "stem"),
    [("text_encoder_2", "lora_te3_"), ("text_encoder_3", "lora_te3_"), ("", "lora_te3_")],
)
def test_t5_is_third_for_trainers_and_second_of_flux(
    tmp_path: Path, component: str, stem: str
) -> None:
    writing = Writing(engine("t5"))
    writing.add(f"{stem}{flat(T5)}", T5)
    file = writing.save(tmp_path / "a.safetensors")
    assert_same(deltas(file, replace(engine("t5"), component=component)), writing.expected)


def test_the_second_clip_passes_over_t5(tmp_path: Path) -> None:
    writing = Writing(engine("t5"))
    writing.add(f"lora_te3_{flat(T5)}", T5)
    clip = Writing(engine("clip_g"))
    clip.add(f"lora_te2_text_model_{flat(LAYER)}", f"text_model.{LAYER}")
    clip.tensors |= writing.tensors
    manifest = replace(engine("clip_g"), component="text_encoder_2")
    assert_same(deltas(clip.save(tmp_path / "a.safetensors"), manifest), clip.expected)


def dead_layer() -> Manifest:
    """CLIP-L in SDXL: its last layer is in no output."""
    whole = engine("clip_l")
    dead = [site.path for site in whole.sites if ".11." in site.path]
    sites = tuple(site for site in whole.sites if site.path not in dead)
    return replace(whole, sites=sites, no_effect=tuple(dead))


@pytest.mark.parametrize("prefix", ["text_model.", ""])
@pytest.mark.parametrize("ends", [PEFT, KOHYA])
def test_modules_without_effect_are_ignored(
    tmp_path: Path, prefix: str, ends: tuple[str, str]
) -> None:
    writing = Writing(engine("clip_l"))
    for path in (LAYER, LAST):
        writing.add(f"text_encoder.{prefix}{path}", path, ends=ends)
    file = writing.save(tmp_path / "a.safetensors")
    del writing.expected[LAST]
    assert_same(deltas(file, dead_layer()), writing.expected)
    ignored = coverage_of(file, dead_layer()).ignored
    assert ignored == {f"text_encoder.{prefix}{LAST}.{end}": NO_EFFECT for end in ends}


@pytest.mark.parametrize("prefix", ["text_model.", ""])
def test_a_peft_directory_has_either_name_too(tmp_path: Path, prefix: str) -> None:
    writing = Writing(engine("clip_l"))
    for path in (LAYER, LAST):
        writing.add(f"{prefix}{path}", path, ends=("lora_A", "lora_B"))
    folder = write_peft(tmp_path / "a", writing.tensors)
    del writing.expected[LAST]
    assert_same(deltas(folder, dead_layer()), writing.expected)
    ignored = coverage_of(folder, dead_layer()).ignored
    assert [*ignored.values()] == [NO_EFFECT] * 2


def test_without_no_effect_they_are_refused(tmp_path: Path) -> None:
    writing = Writing(engine("clip_l"))
    for path in (LAYER, LAST):
        writing.add(f"lora_te_{flat(path)}", path)
    file = writing.save(tmp_path / "a.safetensors")
    with refused(AdapterError, file, flat(LAST), "no site"):
        deltas(file, replace(dead_layer(), no_effect=()))
