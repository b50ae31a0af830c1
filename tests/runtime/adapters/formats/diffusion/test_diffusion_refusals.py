"""Files of diffusion adapters that are refused, in one sentence, and nothing half applied."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.adapters.diffusion.file_kinds import beside, flat, kohya
from support.adapters.diffusion.models import assert_same, deltas, engine, engine_of
from support.adapters.diffusion.writing import PEFT, Writing
from support.refusals import refused

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import GRAPH

Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
K = Q.replace("to_q", "to_k")
STEM = f"lora_unet_{flat(Q)}"


def written(folder: Path, change: Callable[[Writing], object]) -> Path:
    """One module of LoRA, and a change."""
    writing = Writing(engine("sdxl"))
    writing.add(STEM, Q, alpha=np.float32(1))
    change(writing)
    return writing.save(folder / "adapter.safetensors")


def put(name: str, value: object) -> Callable[[Writing], object]:
    return lambda w: w.tensors.update({name: np.asarray(value)})


def meta(**fields: str) -> Callable[[Writing], object]:
    return lambda w: w.metadata.update(fields)


def drop(end: str) -> Callable[[Writing], object]:
    return lambda w: w.tensors.pop(f"{STEM}.{end}")


SHAPELESS = {
    "an alpha that is no number": (put(f"{STEM}.alpha", np.float16(np.nan)), "alpha is nan"),
    "an alpha with a shape": (put(f"{STEM}.alpha", np.ones(2)), "alpha has shape [2]"),
    "a factor with no matrix": (
        put(f"{STEM}.lora_up.weight", np.ones(3, "f")),
        "expected a matrix",
    ),
    "a factor that is missing": (drop("lora_up.weight"), "its up is missing"),
    "an alpha by itself": (
        put("lora_unet_mid_block_attentions_0_proj_in.alpha", 1.0),
        "no factors",
    ),
    "a factor twice": (put(f"{STEM}.lora_A.weight", np.ones((2, 10), "f")), "two tensors for one"),
    "factors of two kinds": (put(f"{STEM}.lokr_w1", np.ones((2, 2), "f")), "lokr"),
    "other ranks": (put(f"{STEM}.lora_up.weight", np.ones((10, 3), "f")), "have ranks 3 and 2"),
    "a tensor of no kind": (put(f"{STEM}.magic", np.ones(3, "f")), "no tensor of LoRA or LyCORIS"),
    "a module twice": (
        lambda w: w.add("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", Q),
        "are for one module",
    ),
    "DoRA of inputs": (put(f"{STEM}.dora_scale", np.ones((1, 10), "f")), "DoRA of inputs"),
    "metadata that are no JSON": (
        lambda w: (w.add(f"unet.{K}", K, ends=PEFT), w.metadata.update(lora_adapter_metadata="{")),
        "is not JSON",
    ),
    "metadata that are a list": (
        lambda w: (w.add(f"unet.{K}", K, ends=PEFT), w.metadata.update(lora_adapter_metadata="[]")),
        "expected an object",
    ),
    "metadata of another rank": (
        lambda w: (
            w.add(f"unet.{K}", K, ends=PEFT, rank=3),
            w.configure(unet__r=2, unet__peft_type="LORA"),
        ),
        "says rank 2",
    ),
    "metadata of another kind": (
        lambda w: (w.add(f"unet.{K}", K, ends=PEFT), w.configure(unet__peft_type="LOHA")),
        "only 'LORA' is supported",
    ),
    "a scale that was left behind": (
        lambda w: w.add(f"base_model.model.{K}", K, ends=PEFT),
        "adapter_config.json",
    ),
}


@pytest.mark.parametrize("name", SHAPELESS)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    change, words = SHAPELESS[name]
    file = written(tmp_path, change)
    with refused(AdapterError, file, words):
        deltas(file, engine("sdxl"))


@pytest.mark.parametrize("name", ["dora_scale", "diff", "diff_b", "oft_blocks", "lora_up.bias"])
def test_no_half_of_a_module_is_applied(tmp_path: Path, name: str) -> None:
    """With strict=False too: its factors without the rest would be another adapter."""
    writing, manifest = Writing(engine("sdxl")), engine("sdxl")
    beside(name)(writing)
    writing.add(f"lora_unet_{flat(K)}", K)
    file = writing.save(tmp_path / "adapter.safetensors")
    if name == "dora_scale":  # of which an engine may have room
        with refused(AdapterError, file, "DoRA", "--lora-vectors"):
            preview_adapter(load_adapter(file, manifest), manifest, strict=False)
        graph = replace(manifest, kind=GRAPH)
        with pytest.raises(AdapterError, match=r"DoRA rescales the base weight(?!.*--lora-v)"):
            preview_adapter(load_adapter(file, graph), graph, strict=False)
        return
    coverage = preview_adapter(load_adapter(file, manifest), manifest, strict=False)
    assert [site.path for site in coverage.adapted] == [K]
    assert {*coverage.unexpected_keys} == {n for n in writing.tensors if n.startswith(STEM)}


@pytest.mark.parametrize("end", ["diff", "diff_b", "lora_B.bias", "w_norm", "b_norm"])
@pytest.mark.parametrize("stem", [STEM, "lora_unet_down_blocks_0_resnets_0_norm1"])
def test_what_adds_zero_is_ignored(tmp_path: Path, end: str, stem: str) -> None:
    file = written(tmp_path, put(f"{stem}.{end}", np.zeros(10, np.float16)))
    coverage = preview_adapter(load_adapter(file, engine("sdxl")), engine("sdxl"))
    assert coverage.is_taken
    assert coverage.ignored == {f"{stem}.{end}": "it has no effect: all its values are 0"}


def test_a_file_needs_an_engine_to_explain_it(tmp_path: Path) -> None:
    file = written(tmp_path, lambda w: None)
    with refused(AdapterError, file, "--engine DIR"):
        load_adapter(file)


def test_convolutions_without_sites_say_how_to_have_them(tmp_path: Path) -> None:
    path = "down_blocks.1.resnets.0.conv1"
    file = written(tmp_path, lambda w: w.add(f"lora_unet_{flat(path)}", path, taps=(3, 3)))
    with refused(AdapterError, file, "--lora-target-modules conv"):
        deltas(file, engine_of("sdxl", lambda path: "conv" not in path))


def test_another_base_is_one_sentence(tmp_path: Path) -> None:
    """All of SD 1.5's linears on SDXL's engine."""
    manifest = engine_of("sd15", lambda path: "conv" not in path)
    writing = Writing(manifest)
    kohya(writing)
    file = writing.save(tmp_path / "adapter.safetensors")
    with pytest.raises(AdapterError) as caught:
        load_adapter(file, engine("sdxl"))
    message = str(caught.value)
    assert message.startswith(f"{file} is for another base model than tiny, an engine of SDXL: ")
    assert "\n" not in message
    assert len(message) < 600
    assert "modules have other widths" in message


@pytest.mark.parametrize(
    ("field", "value", "family"),
    [
        ("ss_base_model_version", "sd_v1", "Stable Diffusion 1"),
        ("modelspec.architecture", "Flux.1-dev/lora", "Flux"),
    ],
)
def test_metadata_name_the_base(tmp_path: Path, field: str, value: str, family: str) -> None:
    stem = "lora_unet_down_blocks_0_attentions_0_proj_in"
    file = written(tmp_path, lambda w: (put(f"{stem}.lora_up.weight", np.ones((5, 2), "f"))(w),
                                        put(f"{stem}.lora_down.weight", np.ones((2, 5), "f"))(w),
                                        meta(**{field: value})(w)))  # fmt: skip
    with refused(AdapterError, file, f"its metadata name {family}", field, "1 have no place"):
        load_adapter(file, engine("sdxl"))


def test_a_file_that_fits_may_be_called_anything(tmp_path: Path) -> None:
    file = written(tmp_path, meta(ss_base_model_version="sd_v1"))
    assert deltas(file, engine("sdxl")).keys() == {Q}


def test_names_of_bindings_go_first(tmp_path: Path) -> None:
    """A [k, r] of the engine's own names is not A [r, k] of diffusers'."""
    manifest = engine("sdxl")
    site = next(site for site in manifest.sites if site.path == Q)
    writing = Writing(manifest)
    a, b = writing.random(site.k, 2), writing.random(2, site.n)
    writing.tensors |= {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}
    file = writing.save(tmp_path / "adapter.safetensors")
    assert_same(deltas(file, manifest), {Q: (a.astype(np.float64) @ b).T})


def test_diffusers_names_without_a_prefix_are_told_by_the_metadata(tmp_path: Path) -> None:
    """What `save_lora_adapter` of a model writes."""
    writing = Writing(engine("sdxl"))
    writing.add(Q, Q, ends=PEFT, scale=2.0)
    writing.configure(peft_type="LORA", r=2, lora_alpha=4)
    file = writing.save(tmp_path / "adapter.safetensors")
    assert_same(deltas(file, engine("sdxl")), writing.expected)


@pytest.mark.parametrize("name", ["pytorch_lora_weights.safetensors", "style.safetensors"])
def test_a_file_in_a_directory_is_read(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, lambda w: None)
    file.rename(tmp_path / name)
    assert deltas(tmp_path, engine("sdxl")).keys() == {Q}


def test_two_files_in_a_directory_are_not_chosen_from(tmp_path: Path) -> None:
    written(tmp_path, lambda w: None).rename(tmp_path / "one.safetensors")
    written(tmp_path, lambda w: None)
    with refused(AdapterError, tmp_path, "one .safetensors file"):
        load_adapter(tmp_path, engine("sdxl"))


def test_no_factor_is_read_before_it_is_cast(tmp_path: Path) -> None:
    """Rewritten in the meantime, the file is refused when a factor is asked for, and not before."""
    file = written(tmp_path, lambda w: w.add(f"unet.{K}", K, ends=PEFT))
    adapter = load_adapter(file, engine("sdxl"))
    file.write_bytes(bytes(file.stat().st_size))
    assert preview_adapter(adapter, engine("sdxl")).is_taken
    with refused(AdapterError, file, "changed"):
        adapter.in_memory()
