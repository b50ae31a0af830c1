"""Models that cannot be engines are refused by their classes and config, in our words."""

from typing import Any

import pytest
import torch
from architectures import small_config
from transformers import AutoModelForCausalLM

from trt_lora.builder.quiet import quiet
from trt_lora.builder.unsupported import check_supported
from trt_lora.plugins.errors import ModelError

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def without_weights(model_type: str, **fields: Any) -> Any:
    """A model on the meta device, whose weights cannot be read."""
    config = small_config(model_type)
    for name, value in fields.items():
        setattr(config, name, value)
    auto: Any = AutoModelForCausalLM
    with quiet(), torch.device("meta"):
        return auto.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        ("mixtral", {}, "it is a mixture of experts (MixtralExperts)"),
        ("dbrx", {}, "it is a mixture of experts (DbrxExperts)"),
        ("mamba", {}, "keep a state (state space or linear attention)"),
        ("rwkv", {}, "keep a state (state space or linear attention)"),
        ("recurrent_gemma", {}, "keep a state (state space or linear attention)"),
        ("qwen3_next", {}, "keep a state (state space or linear attention)"),
        ("bert", {"is_decoder": False}, "it is not a decoder"),
        ("roberta", {"is_decoder": False}, "it is not a decoder"),
        ("bart", {}, "attend to an encoder (cross attention)"),
        ("whisper", {}, "attend to an encoder (cross attention)"),
        ("granite_swa", {}, "attention has sinks"),
        ("lfm2", {}, "layers of type conv"),
        ("doge", {}, "dynamic mask attention"),
        ("llama", {"rope_parameters": DYNAMIC}, "its rope is dynamic"),
    ],
)
def test_the_reason_is_named_on_one_line(
    model_type: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        check_supported(without_weights(model_type, **fields))
    assert words in str(refusal.value)
    assert "docs/supported-models.md" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "gpt_neox", "falcon", "bloom"])
def test_a_dense_decoder_is_supported(model_type: str) -> None:
    check_supported(without_weights(model_type))
