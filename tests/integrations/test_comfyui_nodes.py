"""The nodes: what they show, open and refuse, and how samplers and encoders call what they give."""

import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.conftest import Comfy, factors
from safetensors.torch import save_file
from support.doc_blocks import ROOT
from support.models.small_pipelines import WIDTH

from trt_lora.plugins.errors import AdapterError, ConfigError


def test_the_workflow_has_the_nodes_inputs_and_outputs(comfy: Comfy) -> None:
    path = ROOT / "integrations" / "comfyui" / "workflows" / "sdxl_loras.json"
    flow = json.loads(path.read_text())
    nodes = {node["id"]: node for node in flow["nodes"]}
    for number, source, out, target, into, kind in flow["links"]:
        sent, taken = nodes[source]["outputs"][out], nodes[target]["inputs"][into]
        assert number in sent["links"]
        assert number == taken["link"]
        assert sent["type"] == taken["type"] == kind
    own = [node for node in nodes.values() if node["type"] in comfy.nodes.NODE_CLASS_MAPPINGS]
    assert {n["type"] for n in own} == {*comfy.nodes.NODE_CLASS_MAPPINGS}
    assert comfy.nodes.NODE_DISPLAY_NAME_MAPPINGS.keys() == comfy.nodes.NODE_CLASS_MAPPINGS.keys()
    for node in own:
        kind = comfy.nodes.NODE_CLASS_MAPPINGS[node["type"]]
        shown = {k: v for part in kind.INPUT_TYPES().values() for k, v in part.items()}
        inputs = {each["name"]: each["type"] for each in node["inputs"]}
        assert inputs == {name: t[0] for name, t in shown.items() if t[0] in ("MODEL", "CLIP")}
        widgets = [t for name, t in shown.items() if name not in inputs]
        assert len(widgets) == len(node["widgets_values"])
        assert [out["type"] for out in node["outputs"]] == [*kind.RETURN_TYPES]
        assert callable(getattr(kind, kind.FUNCTION))


def test_the_loader_lists_pipelines_and_single_engines_and_names_what_is_wrong(
    comfy: Comfy, tmp_path: Path
) -> None:
    folder = comfy.models / "trt_lora"
    (folder / "alone").symlink_to(folder / "sdxl" / "unet")
    (folder / "texts").symlink_to(folder / "sdxl" / "text_encoder")
    shown = comfy.nodes.EngineLoader.INPUT_TYPES()["required"]["engine"][0]
    assert shown == ["alone", "flux", "sdxl", "texts"]
    loader = comfy.nodes.EngineLoader()
    model, clip = loader.load("alone")
    assert clip is None
    assert comfy.sdxl.run(model).equal(comfy.sdxl.run(comfy.sdxl.model))
    with pytest.raises(ConfigError, match=r"'sdlx'; .*did you mean 'sdxl'"):
        loader.load("sdlx")
    with pytest.raises(ConfigError, match="no denoiser, only text_encoder"):
        loader.load("texts")


def test_engines_are_closed_where_the_loader_fails(
    comfy: Comfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def fail(engines: Any, family: str) -> None:
        seen.append((engines, repr(engines)))
        raise ConfigError(f"planted in {family}")

    monkeypatch.setattr(comfy.nodes.nodes, "clip_of", fail)
    with pytest.raises(ConfigError, match="planted in SDXL"):
        comfy.nodes.EngineLoader().load("sdxl")
    ((engines, shown),) = seen
    assert "open" in shown
    assert "closed" in repr(engines)


def test_engines_are_closed_with_the_last_model(comfy: Comfy) -> None:
    model, clip = comfy.nodes.EngineLoader().load("sdxl")
    engines = model.model_loras.engines
    del model
    gc.collect()
    clip.encode("a cat")
    del clip
    gc.collect()
    assert "closed" in repr(engines)


def test_layouts_are_those_that_comfyui_makes_its_names_of(comfy: Comfy) -> None:
    config = comfy.sdxl.model.model.model_config.unet_config
    assert config["num_res_blocks"] == [1, 1]
    assert config["transformer_depth"] == [0, 1]
    assert config["transformer_depth_output"] == [0, 0, 1, 0]
    assert (config["transformer_depth_middle"], config["in_channels"]) == (1, 4)
    config = comfy.flux.model.model.model_config.unet_config
    assert [config[n] for n in ("depth", "depth_single_blocks", "hidden_size")] == [1, 1, WIDTH]
    assert (config["in_channels"], config["out_channels"]) == (4, 4)


def test_sizes_come_to_the_engine_as_numbers_beside_the_pooled_text(comfy: Comfy) -> None:
    pooled = torch.rand(1, WIDTH)
    encode = comfy.sdxl.model.model.encode_adm
    y = encode(pooled_output=pooled, width=96, height=64, crop_w=1, crop_h=2, target_width=128)
    assert torch.equal(y, torch.cat([pooled, torch.tensor([[64.0, 96, 2, 1, 64, 128]])], 1))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"control": {"output": []}}, "control"),
        ({"ref_latents": [1]}, "ref_latents: an engine has no input"),
        ({"transformer_options": {"patches": {"attn1_patch": [1]}}}, "attn1_patch"),
        ({"transformer_options": {"patches_replace": {"dit": {1: 1}}}}, "dit"),
        ({"y": None}, "no pooled text"),
    ],
)
def test_what_an_engine_has_no_input_for_is_refused_by_name(
    comfy: Comfy, asked: dict[str, Any], words: str
) -> None:
    given = {**comfy.flux.asked, **asked}
    model = comfy.flux.model.model
    with pytest.raises(ConfigError, match=words):
        model.apply_model(comfy.flux.latent, torch.ones(2), **given)
    quiet = {"transformer_options": {"patches": {}, "sigmas": 1}, "attention_mask": None}
    model.apply_model(comfy.flux.latent, torch.ones(2), **comfy.flux.asked, **quiet)


def test_a_latent_without_whole_patches_is_refused(comfy: Comfy) -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        comfy.flux.model.model.apply_model(
            torch.rand(2, 4, 5, 6), torch.ones(2), **comfy.flux.asked
        )


def test_more_rows_than_the_profile_run_in_batches(comfy: Comfy) -> None:
    run = comfy.nodes.nodes.model_of.__globals__["run_engine"]
    sizes = {"hidden_states": SimpleNamespace(max=(2, 6, WIDTH))}
    asked: list[dict[str, Any]] = []

    class Engines:
        """Two rows at a time."""

        engines = {"transformer": SimpleNamespace(manifest=None)}  # noqa: RUF012

        def run(self, component: str, inputs: dict[str, Any], *, adapter: str) -> dict[str, Any]:
            asked.append({name: array.shape[0] for name, array in inputs.items()})
            return {"out": inputs["hidden_states"] * 2}

    real = comfy.flux.model.model_loras.engines.engines["transformer"].manifest
    shown = SimpleNamespace(inputs=real.inputs, profiles={"default": sizes})
    Engines.engines["transformer"].manifest = shown
    tokens = torch.rand(3, 6, WIDTH, dtype=torch.bfloat16)
    inputs = {"hidden_states": tokens, "img_ids": torch.rand(6, 3), "other": tokens}
    found = run(Engines(), "transformer", inputs, "a")
    assert asked == [{"hidden_states": n, "img_ids": 6} for n in (2, 1)]
    assert torch.equal(found["out"], tokens.float() * 2)


def test_clip_refuses_other_layers_and_embeddings(comfy: Comfy) -> None:
    clip = comfy.sdxl.clip.clone()
    clip.layer_idx = -2
    clip.encode("a cat")
    for options in ({"layer": -1}, {"projected_pooled": False}):
        with pytest.raises(ConfigError, match=r"the engine of text_encoder.* gives layer -2"):
            clip.encode("a cat", **options)
    with pytest.raises(ConfigError, match="textual inversions"):
        clip.cond_stage_model.encode_token_weights(
            {key: [[(torch.ones(WIDTH), 1.0), (3, 1.0)]] for key in "lg"}
        )


def test_tokens_have_weights(comfy: Comfy) -> None:
    model = comfy.sdxl.clip.cond_stage_model
    rows = {key: [[(5, weight), (6, 1.0)] for weight in (1.0, 0.5)] for key in "lg"}
    empty = model._encoders["l"].special_tokens
    (found, _), ids = model.encode_token_weights(rows), torch.tensor([[5, 6], [49406, 49407]])
    whole, nothing = comfy.sdxl.models["text_encoder"].run({}, input_ids=ids)[1]
    assert (empty["start"], empty["end"]) == (49406, 49407)
    half = (whole[0] - nothing[0]) * 0.5 + nothing[0]
    assert (found[0, 2, :WIDTH] - half).abs().max() < 1e-5
    assert (found[0, 0, :WIDTH] - whole[0]).abs().max() < 1e-5


@pytest.fixture
def file(comfy: Comfy) -> Path:
    path = comfy.models / "loras" / "my style 2.safetensors"
    torch.manual_seed(9)
    parts = factors(WIDTH, WIDTH)
    save_file({f"lora_unet_time_embed_0.{end}": t for end, t in parts.items()}, path)
    return path


@pytest.mark.parametrize("line", ["my style 2.safetensors 0.5", "{path} .5 0.1", "\n {path} 5e-1 "])
def test_lines_of_the_stack_are_files_and_strengths(comfy: Comfy, file: Path, line: str) -> None:
    stack, sdxl = comfy.nodes.LoraStack(), comfy.sdxl
    if "e-1" in line:
        with pytest.raises(ConfigError, match="is no line such as"):
            stack.load(sdxl.model, line.format(path=file))
        return
    model, clip, told = stack.load(sdxl.model, line.format(path=file), sdxl.clip)
    assert [*model.strengths.values()] == [0.5]
    assert [*clip.patcher.strengths.values()] == [0.1 if ".1" in line else 0.5]
    assert "unet: <Coverage of" in told
    assert "1 of 6 sites adapted" in told
    before = sdxl.run(model)
    os.utime(file, ns=(1, 1))  # as if it was written again: it is another adapter
    again, _, _ = stack.load(sdxl.model, f"{file} 0.5")
    assert model.strengths.keys() != again.strengths.keys()
    assert torch.equal(sdxl.run(again), before)
    assert not torch.equal(sdxl.run(sdxl.model), before)


def test_the_stack_refuses_what_is_no_file_of_this_engine(comfy: Comfy, file: Path) -> None:
    stack, sdxl = comfy.nodes.LoraStack(), comfy.sdxl
    with pytest.raises(ConfigError, match=r"did you mean 'my style 2.safetensors'"):
        stack.load(sdxl.model, "my style.safetensors 1")
    for model, clip in ((SimpleNamespace(clone=object), None), (comfy.flux.model, sdxl.clip)):
        with pytest.raises(ConfigError, match="not of one engine loader"):
            stack.load(model, "x 1", clip)
    with pytest.raises(AdapterError, match="time_embed"):
        stack.load(comfy.flux.model, f"{file} 1")
