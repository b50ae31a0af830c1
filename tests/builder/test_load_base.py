"""A model that is to be quantised has no weight of what becomes codes."""

from pathlib import Path

import pytest
import torch
from support.models.checkpoints import Weights, with_weights
from support.models.loaded_base import loaded
from support.models.tiny_models import save_model, tiny_config

from trt_lora.plugins.errors import ModelError


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head", ["int8", "none"])
def test_what_becomes_codes_has_stand_ins_and_the_rest_its_floats(
    head: str, dtype: str, tmp_path: Path
) -> None:
    model = save_model("Llama", tmp_path / "m")
    options = {"quantize": "int8", "quantize_block": 16, "quantize_head": head, "dtype": dtype}
    base = loaded(tiny_config(model, tmp_path / "e", **options))
    assert base.stand_ins is not None
    assert base.stand_ins.paths(base.model).keys() == base.codes.keys()
    assert len(base.codes) == 15 - (head == "none")
    assert {str(weight.dtype) for weight in base.model.parameters()} == {f"torch.{dtype}"}
    plain = loaded(tiny_config(model, tmp_path / "e", dtype=dtype)).model
    kept = {
        name: weight
        for name, weight in base.model.named_parameters()
        if name.removesuffix(".weight") not in base.codes
    }
    assert len(kept) == len(dict(plain.named_parameters())) - len(base.codes)
    assert all(torch.equal(weight, plain.get_parameter(name)) for name, weight in kept.items())


def test_a_damaged_weight_is_refused_before_codes_are_looked_for(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def damaged(weights: Weights) -> Weights:
        weights[name][0, 0] = float("nan")
        return weights

    model = with_weights(save_model("Llama", tmp_path / "m"), tmp_path / "d", damaged)
    with pytest.raises(ModelError, match=f"{name} has NaN values: the model is damaged"):
        loaded(tiny_config(model, tmp_path / "e", quantize="int8", quantize_block=16))
