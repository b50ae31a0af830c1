"""Tensors that an adapter's config does not target: PEFT ignores them, and so does an engine."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from support.adapters.peft_cases import CONFIGS, NOWHERE, Q
from support.models import tiny_models as tiny
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import Engine, LoRAManager, open_engine
from trt_lora.scripts.verification.logits import engine_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow  # for the engine that all of them share

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Full:
    """An engine with a site on every linear and the head, and an adapter with tensors for each."""

    model: Path
    engine: Engine
    adapter: Path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    folder = tmp_path_factory.mktemp("surplus")
    model = save_model("Llama", folder / "model")
    quick_build(tiny_config(model, folder / "e", target_modules=("all-linear", "lm_head")))
    adapter = save_adapter(model, folder / "a", target_modules=r".*(proj|lm_head)")
    tensors = load_file(adapter / WEIGHTS)
    save_file({n: t for n, t in tensors.items() if "lora_" in n}, adapter / WEIGHTS)
    with open_engine(folder / "e") as engine:
        yield Full(model, engine, adapter)


def with_config(full: Full, directory: Path, fields: dict[str, Any]) -> Path:
    """The same tensors, but a config with other fields."""
    config = json.loads((full.adapter / CONFIG).read_text())
    directory.mkdir()
    (directory / CONFIG).write_text(json.dumps(config | fields))
    (directory / WEIGHTS).write_bytes((full.adapter / WEIGHTS).read_bytes())
    return directory


def manager_of(full: Full) -> LoRAManager:
    manager = LoRAManager()
    manager.initialize_engine_bindings(full.engine)
    return manager


@suppress_output()
def unexpected_in_peft(full: Full, adapter: Path) -> set[str]:
    """The tensors that PEFT found no place for, under their names in the file."""
    base = transformers.AutoModelForCausalLM.from_pretrained(full.model, dtype=torch.float32)
    config: Any = LoraConfig.from_pretrained(str(adapter))
    loaded = PeftModel(base, config, adapter_name="a").load_adapter(str(adapter), "a")
    return {name.replace(".a.weight", ".weight") for name in loaded.unexpected_keys}


@pytest.mark.parametrize("fields", [*CONFIGS, {"target_modules": "all-linear"}], ids=str)
def test_an_engine_ignores_what_peft_ignores_and_answers_as_it_does(
    full: Full, tmp_path: Path, fields: dict[str, Any]
) -> None:
    adapter = with_config(full, tmp_path / "a", fields)
    coverage = full.engine.adapters.load("a", adapter, replace=True)
    assert coverage.unexpected_keys == {}
    assert coverage.ignored.keys() == unexpected_in_peft(full, adapter) != set()
    ids = np.random.default_rng(0).integers(3, tiny.VOCABULARY, (2, 12))
    ours = engine_logits(full.engine, "a", ids, prompt=8)
    theirs = PeftReference(full.model, {"a": adapter}).logits("a", ids, np.ones_like(ids))
    assert np.abs(ours - theirs).max() < 1e-4
    assert np.abs(ours - engine_logits(full.engine, "", ids, prompt=8)).max() > 0.01


def test_what_is_ignored_is_listed_with_the_reason_and_logged_in_one_line(
    full: Full, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = with_config(full, tmp_path / "a", {"target_modules": ["q_proj"]})
    with caplog.at_level(logging.WARNING, "trt_lora"):
        coverage = manager_of(full).load_weights("a", adapter)
    assert coverage is not None
    assert len(coverage.ignored) == 2 * (2 * 6 + 1)
    assert set(coverage.ignored.values()) == {
        "its config does not target the module, so that PEFT does not apply it either"
    }
    assert [site.path for site in coverage.adapted] == [Q, Q.replace("0", "1")]
    (line,) = caplog.messages
    assert line == f"{adapter}: {coverage.warnings[0]}"
    assert "26 of its tensors are ignored, as PEFT ignores them" in line
    assert line.endswith(" and 23 more")


@pytest.mark.parametrize("fields", NOWHERE, ids=str)
def test_an_adapter_whose_config_targets_none_of_its_tensors_is_refused(
    full: Full, tmp_path: Path, fields: dict[str, Any]
) -> None:
    adapter = with_config(full, tmp_path / "a", fields)
    with pytest.raises(AdapterError, match="30 of its tensors are ignored, as PEFT ignores them"):
        manager_of(full).load_weights("a", adapter)


def test_the_rank_of_an_ignored_tensor_does_not_matter(full: Full, tmp_path: Path) -> None:
    fields = {"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 3}}
    adapter = with_config(full, tmp_path / "a", fields)
    coverage = manager_of(full).load_weights("a", adapter)
    assert coverage is not None
    assert len(coverage.adapted) == 2


def test_targets_that_only_the_model_tells_are_warned_of_and_applied(
    full: Full, tmp_path: Path
) -> None:
    adapter = with_config(full, tmp_path / "a", {"target_modules": None})
    coverage = manager_of(full).load_weights("a", adapter)
    assert coverage is not None
    (warning,) = coverage.warnings
    assert "and 12 more cannot be told without the model (it has no target_modules)" in warning
    assert len(coverage.adapted) == 15


def test_a_blend_of_adapters_has_no_tensor_that_one_of_them_ignores(
    full: Full, tmp_path: Path
) -> None:
    manager = manager_of(full)
    manager.load_weights("a", with_config(full, tmp_path / "a", {"target_modules": ["q_proj"]}))
    manager.load_weights("b", with_config(full, tmp_path / "b", {"target_modules": ["v_proj"]}))
    coverage = manager.blend("both", {"a": 0.5, "b": 1.0})
    assert coverage is not None
    assert {site.path.rpartition(".")[2] for site in coverage.adapted} == {"q_proj", "v_proj"}
    assert coverage.warnings == ()
    manager.switch_weights("both")
