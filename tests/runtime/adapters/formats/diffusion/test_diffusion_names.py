"""Spellings of modules: every one of real models is found, as diffusers' own converters say."""

import pytest
from support.adapters.diffusion.models import original_names, sizes

from trt_lora.runtime.adapters.formats.diffusion.spellings import Spellings

MODELS = ("sd15", "sdxl", "sd3", "flux", "qwen", "wan", "clip_l", "clip_g", "t5")
CONVERTERS_BUG = {"output_blocks.2.1.conv": "up_blocks.0.upsamplers.0.conv"}  # of SD 1.5


@pytest.mark.parametrize("model", MODELS)
def test_every_path_is_found_with_dots_and_with_underscores(model: str) -> None:
    paths = sizes(model)
    spellings = Spellings(list(paths))
    for path in paths:
        for stem in (path, path.replace(".", "_"), "lora_unet_" + path.replace(".", "_")):
            assert (place := spellings.find(stem)[2]), stem
            assert place.paths == (path,)


@pytest.mark.parametrize("model", ["sd15", "sdxl"])
def test_original_names_of_a_unet_are_those_of_diffusers(model: str) -> None:
    found = original_names(model)
    assert len(found) == len(sizes(model))  # every module has one
    spellings = Spellings(list(sizes(model)))
    for name, theirs in found.items():
        expected = CONVERTERS_BUG.get(name) if model == "sd15" else None
        for stem in (f"diffusion_model.{name}", "lora_unet_" + name.replace(".", "_")):
            place = spellings.find(stem)[2]
            assert place, stem
            assert [*place.paths] == ([expected] if expected else [*theirs])


@pytest.mark.parametrize("model", ["flux", "sd3", "wan"])
def test_original_names_of_a_transformer_are_those_of_diffusers(model: str) -> None:
    """Columns too: which of a fused module's outputs are whose, and which halves are exchanged."""
    widths = {path: n for path, (_, n) in sizes(model).items()}
    spellings = Spellings(list(widths))
    for name, theirs in original_names(model).items():
        place = spellings.find(name)[2]
        assert place, name
        assert [*place.paths] == [*theirs]
        start = 0
        for path, rows in theirs.items():
            n = widths[path] if model != "wan" else 8  # what the converter was given
            half = n // 2 if place.swapped else 0
            assert rows == [start + half, start + (half - 1) % n], path
            start += n


def test_a_swapped_module_is_found_somewhere() -> None:
    for model, name in (("flux", "final_layer.adaLN_modulation.1"),
                        ("sd3", "joint_blocks.23.context_block.adaLN_modulation.1")):  # fmt: skip
        place = Spellings(list(sizes(model))).find(name)[2]
        assert place
        assert place.swapped


def test_fewer_modules_do_not_change_the_original_names_of_the_rest() -> None:
    """An engine of attention alone has the same numbers of blocks."""
    attention = [path for path in sizes("sdxl") if ".attn" in path]
    spellings = Spellings(attention)
    for name, theirs in original_names("sdxl").items():
        if (path := next(iter(theirs))) in attention:
            place = spellings.find(name)[2]
            assert place, name
            assert place.paths == (path,)


def test_a_spelling_of_two_modules_is_of_none() -> None:
    spellings = Spellings(["a.b_c", "a_b.c", "d"])
    assert spellings.find("lora_unet_a_b_c")[2] is None
    assert spellings.find("unet.a.b_c")[2]
    assert spellings.find("lora_unet_d")[2]


def test_a_fused_module_of_which_a_part_takes_no_lora_has_no_place() -> None:
    paths = [path for path in sizes("flux") if not path.endswith("attn.to_k")]
    assert Spellings(paths).find("double_blocks.0.img_attn.qkv")[2] is None
    assert Spellings(paths).find("double_blocks.0.img_attn.proj")[2]
