"""Targets that no layer has, refused by the names in the weight files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyEngine
from safetensors.torch import save_file
from support.models.architectures import small_config
from transformers import AutoModelForCausalLM

from trt_lora.builder.checks.meta_model import find_sites
from trt_lora.builder.checks.weight_names import PLAIN_TYPES, check_weight_names
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.builder.targets import Targets
from trt_lora.plugins.contract.modules import module_of
from trt_lora.plugins.errors import ConfigError, ModelError

ALL = Targets.from_names(["all-linear"])


def saved(model_type: str, folder: Path) -> Any:
    """Save a small model without training it; return it."""
    auto: Any = AutoModelForCausalLM
    with suppress_output():
        model = auto.from_config(small_config(model_type))
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", PLAIN_TYPES)
def test_the_weights_of_these_types_are_named_as_their_modules(
    model_type: str, tmp_path: Path
) -> None:
    sites = find_sites(saved(model_type, tmp_path), ALL)
    paths = [site.path for site in sites.sites] + [item.path for item in sites.left_alone]
    modules = {module.name for module in map(module_of, paths) if module}
    for name in modules:
        check_weight_names(tmp_path, {"model_type": model_type}, Targets.from_names([name]))
    with pytest.raises(ConfigError, match="no layer for the LoRA target module 'mamba_in_proj'"):
        check_weight_names(
            tmp_path, {"model_type": model_type}, Targets.from_names(["mamba_in_proj"])
        )


def test_types_whose_weights_are_renamed_wait_for_their_modules(tmp_path: Path) -> None:
    save_file({"x.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    targets = Targets.from_names(["attn_q"])
    check_weight_names(tmp_path, {"model_type": "gpt_neox"}, targets)
    with pytest.raises(ConfigError, match="it has: lm_head"):
        check_weight_names(tmp_path, {"model_type": "llama"}, targets)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe", "gpt_oss"])
def test_experts_are_seen_in_the_names_of_their_weights(model_type: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    with pytest.raises(ModelError, match="cannot be built: it is a mixture of experts"):
        check_weight_names(tmp_path, {"model_type": model_type}, ALL)


def test_a_dense_deepseek_has_no_experts(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    check_weight_names(tmp_path, {"model_type": "deepseek_v3"}, ALL)


def test_a_folder_without_safetensors_waits_for_its_modules(tmp_path: Path) -> None:
    check_weight_names(tmp_path, {"model_type": "llama"}, Targets.from_names(["attn_q"]))


def test_a_target_that_no_layer_has_is_refused_without_torch(tiny_engine: TinyEngine) -> None:
    program = f"""
import sys
from pathlib import Path
from trt_lora.builder import BuildConfig, build_engine
try:
    build_engine(BuildConfig(Path({str(tiny_engine.model)!r}), Path("e"), ("mamba_in_proj",)))
except Exception as error:
    print(error, {{"torch", "transformers"}} & set(sys.modules))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "no layer for the LoRA target module 'mamba_in_proj'" in found.stdout
    assert found.stdout.rstrip().endswith("set()")
