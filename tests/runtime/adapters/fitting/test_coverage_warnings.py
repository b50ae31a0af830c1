"""What is suspicious about an adapter: a line each, once, in its coverage and in the log."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights, write_peft

from trt_lora.runtime import LoRAManager
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import coverage_warnings
from trt_lora.runtime.memory.dtypes import Array

LAYERS = [f"model.layers.{number}.self_attn" for number in range(2)]
TARGETS = {"target_modules": ["q_proj", "v_proj"]}


def factors(*paths: str) -> dict[str, Array]:
    """Tensors as PEFT stores them, rank 2."""
    both = {"A": (2, 8), "B": (6, 2)}
    return {f"{p}.lora_{f}": np.ones(shape, np.float32) for p in paths for f, shape in both.items()}


def peft(directory: Path, *paths: str, **fields: object) -> Path:
    return write_peft(directory / "a", factors(*paths), **TARGETS | fields)


def everything() -> list[str]:
    return [f"{layer}.{name}" for layer in LAYERS for name in ("q_proj", "v_proj")]


def bound_manager(dtype: str = "float32") -> LoRAManager:
    manager = LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(make_manifest(dtype=dtype)))
    return manager


def test_an_adapter_without_a_fault_is_loaded_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bound_manager().load_weights("a", peft(tmp_path, *everything()))
    assert caplog.messages == []


def test_an_adapter_of_another_base_and_with_few_sites_is_logged_in_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "some\nbase"
    path = peft(tmp_path, f"{LAYERS[0]}.q_proj", base_model_name_or_path=name)
    coverage = bound_manager().load_weights("a", path)
    assert coverage is not None
    assert caplog.messages == [f"{path}: {warning}" for warning in coverage.warnings]
    other, missing = caplog.messages
    assert f"{path}: the adapter names 'some\\nbase' as its base model" in other
    assert f"targets {LAYERS[0]}.v_proj, {LAYERS[1]}.q_proj, {LAYERS[1]}.v_proj, but its" in missing


def test_what_was_loaded_before_the_engine_is_logged_when_the_engine_is_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = LoRAManager()
    manager.load_weights("a", peft(tmp_path, f"{LAYERS[0]}.q_proj"))
    assert caplog.messages == []
    manager.initialize_engine_bindings(FakeExecutor(make_manifest()))
    (line,) = caplog.messages
    assert "it may be incomplete" in line


def test_another_strength_and_a_blend_repeat_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = bound_manager()
    manager.load_weights("a", peft(tmp_path, f"{LAYERS[0]}.q_proj"))
    manager.switch_weights("a", 0.5)
    manager.blend("b", {"a": 0.5})
    assert len(caplog.messages) == 1


def test_tensors_without_a_binding_are_logged_where_they_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = peft(tmp_path, *everything(), "lm_head", target_modules=["q_proj", "v_proj", "lm_head"])
    bound_manager().load_weights("a", path, strict=False)
    (line,) = caplog.messages
    assert "2 of its tensors have no binding in the engine: base_model.model.lm_head.lora_A" in line


def saved(tensors: Mapping[str, Array], directory: Path) -> Path:
    path = directory / "a.safetensors"
    save_file(dict(tensors), path)
    return path


@pytest.mark.parametrize(("adapted", "expected"), [(14, True), (15, False), (30, False)])
def test_few_sites_of_a_module_are_suspicious_without_a_config(
    adapted: int, expected: bool
) -> None:
    sites = [
        SiteCoverage(f"model.layers.{i}.{name}", rank, dtype="float32")
        for i in range(30)
        for name, rank in (("q_proj", 4 * (i < adapted)), ("k_proj", 0))
    ]
    coverage = Coverage("a", {}, {}, tuple(sites))
    found = coverage_warnings(Adapter("a", {}), make_manifest(), coverage)
    assert tuple(found) == (
        ("the adapter has tensors for 14 of the 30 sites of q_proj: it may be incomplete",)
        * expected
    )


def test_values_that_a_cast_makes_zero_are_logged_where_they_are_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {name: 0.5 + 0 * array for name, array in make_weights(make_manifest()).items()}
    first = next(iter(weights))
    weights[first].flat[0] = 1e-30
    bound_manager("float16").load_weights("few", saved(weights, tmp_path))
    (line,) = caplog.messages
    assert f"1 values became 0 in float16, more than 1% of those of {LAYERS[0]}.q_proj" in line
