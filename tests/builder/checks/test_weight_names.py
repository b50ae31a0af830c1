"""Targets that no layer has, refused by the names in the weight files."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.architecture_check import Verdict
from support.models.architectures import small_config
from support.models.supported_models import read_results
from transformers import AutoModelForCausalLM

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checks.meta_model import find_sites
from trt_lora.builder.checks.weight_names import KNOWN_TYPES, check_weight_names
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.builder.targets import Targets
from trt_lora.plugins.contract.modules import MODULES
from trt_lora.plugins.errors import ConfigError

ALL = Targets.from_names(["all-linear"])
# transformers makes other modules of what their files name: they wait for these.
RENAMED = ("granitemoe", "granitemoeshared", "hy_v3", "laguna")


def saved(model_type: str, folder: Path) -> Any:
    """Save a small model without training it; return it."""
    auto: Any = AutoModelForCausalLM
    with suppress_output():
        model = auto.from_config(small_config(model_type))
        model.save_pretrained(folder)
    return model


def of_type(model_type: str, folder: Path) -> Checkpoint:
    """A checkpoint whose config.json has this type alone."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return Checkpoint(folder)


def refusal(check: Callable[[Targets], object], target: str) -> str:
    """What a check says of a target; empty if it takes it."""
    try:
        check(Targets.from_names([target]))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model_type", KNOWN_TYPES)
def test_the_weights_of_these_types_refuse_the_targets_that_their_modules_refuse(
    model_type: str, tmp_path: Path
) -> None:
    model = saved(model_type, tmp_path)
    early = partial(check_weight_names, of_type(model_type, tmp_path))
    late = partial(find_sites, model)
    targets = [*(module.name for module in MODULES), "all-linear"]
    expected = {target: refusal(late, target) for target in targets}
    assert {target: refusal(early, target) for target in targets} == expected
    assert any(expected.values())


def test_every_type_that_builds_is_known() -> None:
    built = [name for name, verdict in read_results().items() if Verdict(**verdict).is_built]
    assert {small_config(name).model_type for name in built} == {*KNOWN_TYPES, *RENAMED}


def test_types_whose_weights_may_be_renamed_wait_for_their_modules(tmp_path: Path) -> None:
    save_file({"x.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    targets = Targets.from_names(["attn_q"])
    check_weight_names(of_type("of_tomorrow", tmp_path), targets)
    with pytest.raises(ConfigError, match="it has: lm_head"):
        check_weight_names(of_type("llama", tmp_path), targets)


def test_a_dense_deepseek_needs_no_experts(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    check_weight_names(of_type("deepseek_v3", tmp_path), ALL)


def test_a_folder_without_safetensors_waits_for_its_modules(tmp_path: Path) -> None:
    check_weight_names(of_type("llama", tmp_path), Targets.from_names(["attn_q"]))


def test_a_target_that_no_layer_has_is_refused_without_torch(tmp_path: Path) -> None:
    types = ("llama", "hrm_text", "gemma3", "roberta")
    for model_type in types:
        saved(model_type, tmp_path / model_type)
    program = f"""
import sys
from pathlib import Path
from trt_lora.builder import BuildConfig, build_engine
for model_type in {types}:
    model = Path({str(tmp_path)!r}, model_type)
    try:
        build_engine(BuildConfig(model, Path("e"), ("mamba_in_proj",)))
    except Exception as error:
        print(error)
print({{"torch", "transformers"}} & set(sys.modules))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *refusals, imported = found.stdout.splitlines()
    assert len(refusals) == len(types)
    for line in refusals:
        assert "no layer for the LoRA target module 'mamba_in_proj'" in line
    assert imported == "set()"
