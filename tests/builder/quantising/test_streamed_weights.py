"""Weights that are read while their modules run, against a model that has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.build_progress import Notes
from support.models.checkpoints import Weights, with_weights
from support.models.tiny_models import save_model, tiny_config
from transformers import AutoModelForCausalLM

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.stand_ins import StandIns
from trt_lora.builder.checks.meta_model import meta_model
from trt_lora.builder.checks.model_config import read_config
from trt_lora.builder.quantising.quantise import Quantiser
from trt_lora.builder.quantising.streamed_weights import StreamedWeights, streamable
from trt_lora.plugins.errors import ModelError

IDS = torch.tensor([[1, 5, 3, 8, 2]])
WHOLE = {"Llama": 15, "GPT2": 0, "Gemma2": 14}  # a tied head has the embedding's floats


def streamed(directory: Path) -> StreamedWeights:
    """The weights of a model that has stand-ins for all that can be streamed."""
    checkpoint = Checkpoint(directory)
    shapes = streamable(checkpoint, meta_model(read_config(checkpoint), "float32"))
    stand_ins = StandIns(shapes, torch.float32)
    model = load_model(checkpoint, "float32", stand_ins.weights)
    names = {path: name for name, path in stand_ins.paths(model).items()}
    assert names.keys() == stand_ins.shapes.keys()
    return StreamedWeights(model, checkpoint, names)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("architecture", WHOLE)
def test_a_model_runs_with_its_weights_and_has_none_of_them_before_and_after(
    architecture: str, tmp_path: Path
) -> None:
    weights = streamed(save_model(architecture, tmp_path / "m"))
    assert len(weights.names) == WHOLE[architecture]
    expected = logits(load_model(weights.checkpoint, "float32"))
    before = logits(weights.model)
    with weights.in_modules():
        assert torch.equal(logits(weights.model), expected)
    assert torch.equal(logits(weights.model), before)
    assert torch.equal(before, expected) == (not weights.names)


@pytest.mark.parametrize("architecture", WHOLE)
def test_every_weight_is_that_of_the_file_with_rows_that_a_product_reads(
    architecture: str, tmp_path: Path
) -> None:
    weights = streamed(save_model(architecture, tmp_path / "m"))
    model = load_model(weights.checkpoint, "float32")
    shapes = dict(weights.shapes())
    assert len(shapes) == {"Llama": 15, "GPT2": 9, "Gemma2": 15}[architecture]
    for path, shape in shapes.items():
        own = model.get_submodule(path).weight
        is_turned = architecture == "GPT2" and path != "lm_head"
        assert torch.equal(weights[path], own.T if is_turned else own)
        assert weights[path].shape == shape


def test_a_weight_is_given_back_where_its_module_fails(tmp_path: Path) -> None:
    weights = streamed(save_model("Llama", tmp_path / "m"))
    module = weights.model.get_submodule("model.layers.0.mlp.down_proj")
    stand_in = module.weight
    with pytest.raises(RuntimeError, match="mat1"), weights.in_modules():
        module(torch.zeros(1, 3))
    assert module.weight is stand_in
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj"

    def damaged(weights: Weights) -> Weights:
        weights[f"{name}.weight"][0, 0] = value
        return weights

    weights = streamed(with_weights(save_model("Llama", tmp_path / "m"), tmp_path / "d", damaged))
    with pytest.raises(ModelError, match=rf"{name}.weight has (NaN|infinite) values"):
        weights.check()
    streamed(tmp_path / "m").check()


def test_a_pickle_is_read_as_a_whole(tmp_path: Path) -> None:
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(save_model("Llama", tmp_path / "m"))
    model.config.save_pretrained(tmp_path / "p")
    torch.save(model.state_dict(), tmp_path / "p" / "pytorch_model.bin")
    assert streamable(Checkpoint(tmp_path / "p"), model) == {}
    assert len(streamable(Checkpoint(tmp_path / "m"), model)) == WHOLE["Llama"]


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_codes_are_those_of_a_model_that_has_its_weights(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = [[1, 5, 3, 8], [2, 9, 4, 7]]
    monkeypatch.setattr(Quantiser, "_windows", lambda _: windows)
    weights = streamed(save_model("Llama", tmp_path / "m"))
    whole = StreamedWeights(load_model(weights.checkpoint, "float32"), weights.checkpoint, {})
    config = tiny_config(tmp_path / "m", tmp_path / "e", quantize=quantize, quantize_block=16)
    found, expected = (
        Quantiser(each, config, False, "lm_head", None, Notes()).quantised()
        for each in (weights, whole)
    )
    assert found.keys() == expected.keys() == dict(weights.shapes()).keys()
    for path, linear in expected.items():
        assert (found[path].weight.dequantised() == linear.weight.dequantised()).all()
        assert found[path].source == linear.source
