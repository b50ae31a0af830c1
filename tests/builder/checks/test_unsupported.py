"""Models that cannot be engines are refused by their classes and config, in our words."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.architectures import small_config
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checks.config_fields import REFUSED_TYPES, check_fields
from trt_lora.builder.checks.unsupported import check_supported
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ModelError

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def without_weights(model_type: str, **fields: Any) -> Any:
    """A model on the meta device, whose weights cannot be read."""
    config = small_config(model_type)
    for name, value in fields.items():
        setattr(config, name, value)
    auto: Any = AutoModelForCausalLM
    with suppress_output(), torch.device("meta"):
        return auto.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        ("dbrx", {}, "it has experts that transformers computes in a way of their own"),
        ("aria_text", {}, "it has experts whose weights are transposed"),
        ("beam", {}, "it has experts with a gate of their own"),
        ("mixtral", {"hidden_act": "gelu"}, "it has experts with GELUActivation instead of SiLU"),
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


@pytest.mark.parametrize("model_type", sorted(REFUSED_TYPES))
def test_a_type_that_cannot_be_built_is_refused_by_config_json_alone(
    tmp_path: Path, model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=re.escape(REFUSED_TYPES[model_type])):
        check_fields(Checkpoint(tmp_path))


@pytest.mark.parametrize("model_type", sorted(set(REFUSED_TYPES) & set(CONFIG_MAPPING)))
def test_a_type_is_refused_as_stateful_only_where_transformers_says_so(model_type: str) -> None:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    assert model_class._is_stateful == ("keep a state" in REFUSED_TYPES[model_type])


def test_what_config_json_tells_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    program = f"""
import sys
from pathlib import Path
from trt_lora.builder import BuildConfig, build_engine
try:
    build_engine(BuildConfig(Path({str(tmp_path)!r}), Path("e"), ("attn_q",), max_seq_len=65))
except Exception as error:
    print(error, {{"torch", "transformers"}} & set(sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "has 64 positions; pass --max-seq-len 64 or less set()" in found.stdout


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "gpt_neox", "falcon", "mixtral"])
def test_a_decoder_is_supported_dense_or_with_experts(model_type: str) -> None:
    check_supported(without_weights(model_type))


def test_all_reasons_are_named() -> None:
    with pytest.raises(ModelError) as refusal:
        check_supported(without_weights("gpt_oss"))
    for words in ("experts with biases", "gate and up are interleaved", "attention has sinks"):
        assert words in str(refusal.value)
