"""The export: its cache's shapes, and errors of torch and of models in one line."""

from typing import Any

import pytest
import torch
from support.models.architectures import small_config
from support.models.tiny_models import ARCHITECTURES
from transformers import AutoModelForCausalLM, LlamaConfig

from trt_lora.builder.export.attention import ATTENTION
from trt_lora.builder.export.causal_lm import export_causal_lm
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ModelError


def random_model(config: Any) -> Any:
    auto: Any = AutoModelForCausalLM
    with suppress_output():
        return auto.from_config(config, attn_implementation=ATTENTION)


def test_keys_and_values_of_different_widths_have_caches_of_their_own_shape() -> None:
    config = small_config("deepseek_v3")
    exported = export_causal_lm(random_model(config), 24)
    shapes = {str(value.name): str(value.shape) for value in exported.model.graph.inputs}
    assert shapes["cache.1.key"] == "[batch,1,24,16]"
    assert shapes["cache.1.value"] == "[batch,1,24,8]"


class Broken(torch.nn.Module):
    """A linear whose trace would depend on values, or that does not even run."""

    def __init__(self, *, runs: bool) -> None:
        super().__init__()
        self.runs = runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.runs:
            raise RuntimeError("first line\nsecond line")
        return x.clone() if x.sum() > 0 else x


@pytest.mark.parametrize("runs", [True, False])
def test_an_error_that_we_do_not_know_is_one_line_with_its_cause(runs: bool) -> None:
    model = random_model(LlamaConfig(**ARCHITECTURES["Llama"]))
    model.model.norm = Broken(runs=runs)
    with pytest.raises(ModelError) as refusal:
        export_causal_lm(model, 24)
    message = str(refusal.value)
    verb = (
        "traced by torch.onnx.export"
        if runs
        else "run on a token: RuntimeError: first line second line;"
    )
    assert message.startswith(f"LlamaForCausalLM cannot be {verb}")
    assert "docs/supported-models.md" in message
    assert "\n" not in message
    assert len(message) < 350
