"""CLIP's text encoder and a ViT of transformers, exported by torch, against PEFT."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, ViTConfig, ViTModel

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.runtime import open_engine

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


class Call(nn.Module):
    """One tensor in, one out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model_ = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model_(x).last_hidden_state
        return states


def clip() -> tuple[nn.Module, torch.Tensor]:
    config = CLIPTextConfig(**SIZES, num_attention_heads=2, vocab_size=50, eos_token_id=2)
    return CLIPTextModel(config), torch.tensor([[5, 7, 11, 2], [3, 9, 2, 2]])


def vit() -> tuple[nn.Module, torch.Tensor]:
    config = ViTConfig(**SIZES, num_attention_heads=2, image_size=16, patch_size=8)
    return ViTModel(config), torch.randn(2, 3, 16, 16)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")  # PEFT's
@pytest.mark.parametrize("make", [clip, vit])
def test_the_engine_computes_what_peft_does(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = make()
    model.eval()
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    adapted.save_pretrained(str(tmp_path / "a"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Call(model), (x,), str(tmp_path / "m.onnx"), dynamo=True,
                          input_names=["x"], output_names=["y"], verbose=False)  # fmt: skip
    graph = GraphConfig(tmp_path / "m.onnx", tmp_path / "e", ("all-linear",), flavour="none")
    manifest = build_engine(graph)
    read = {site.path for site in manifest.sites}
    assert read == {name for name in linears if "pooler" not in name}
    with torch.no_grad():
        expected = Call(adapted.base_model.model)(x).numpy()  # type: ignore[arg-type]
        base = Call(model)(x).numpy()
    with open_engine(tmp_path / "e", "onnxruntime") as engine:
        engine.adapters.load("a", tmp_path / "a", strict=False)  # the pooler is not in the graph
        found = engine.run({"x": x.numpy()}, adapter="a")["y"]
    np.testing.assert_allclose(found, expected, atol=3e-6 * np.abs(expected).max())
    assert np.abs(expected - base).max() > 0.05
