"""Mixtures of experts, end to end: attention, router and shared expert take LoRA, as in PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.mixtures import ATTENTION, LOCAL, MIXTURES, TARGETS, mixture
from support.models.quick_build import quick_build
from support.models.slot_rows import logits_in_a_batch
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder.passes.codes.coded_weight import coded_weights
from trt_lora.plugins.errors import AdapterError, ModelError
from trt_lora.runtime import LoRAManager, load_adapter, open_engine
from trt_lora.runtime import save_adapter as save_adapter_file
from trt_lora.runtime.manifest import ONNX_FILE
from trt_lora.scripts.verification.peft_reference import PeftReference

SHARED = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]


def routed(model: Path, folder: Path, architecture: str, **options: Any) -> Path:
    """An adapter of attention and router; its ranks and scales differ."""
    parameter = MIXTURES[architecture][1]
    own: dict[str, Any] = {
        "target_modules": ATTENTION,
        "target_parameters": [parameter],
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {parameter: 3},
        "alpha_pattern": {parameter: 12},
    }
    return save_adapter(model, folder, **own | options)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MIXTURES)
def test_logits_are_those_of_peft(architecture: str, tmp_path: Path) -> None:
    model = mixture(architecture, tmp_path)
    adapters = {
        "routed": routed(model, tmp_path / "routed", architecture),
        "attention": save_adapter(model, tmp_path / "attention", target_modules=ATTENTION, seed=2),
    }
    manifest = quick_build(tiny_config(model, tmp_path / "engine", target_modules=TARGETS))
    routers = [site for site in manifest.sites if site.path.endswith(("gate", "router"))]
    assert len([site for site in routers if site.n > 1]) == 2  # of two layers
    reference, seen = PeftReference(model, adapters), {}
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        for name, path in adapters.items():
            manager.load_weights(name, path)
        for name in ("", *adapters, ""):
            seen[name] = engine_logits(engine, manager, name)
            assert largest_error(seen[name], reference.logits(name, *batch())) < 1e-4
    save_adapter_file(load_adapter(adapters["routed"]), tmp_path / "again", "peft")
    written = PeftReference(model, {"again": tmp_path / "again"})
    assert largest_error(seen["routed"], written.logits("again", *batch())) < 1e-4
    assert largest_error(seen["routed"], seen["attention"]) > 0.1
    assert largest_error(seen["routed"], seen[""]) > 0.1


@pytest.mark.slow
def test_prompts_of_all_lengths_and_many_steps_share_a_batch_of_adapters(tmp_path: Path) -> None:
    """Rows of Qwen2-MoE, whose shared expert and its gate take LoRA too."""
    model = mixture("Qwen2Moe", tmp_path)
    modules = [*ATTENTION, *SHARED, "shared_expert_gate"]
    adapters = {
        name: routed(model, tmp_path / name, "Qwen2Moe", target_modules=modules, seed=seed)
        for seed, name in enumerate("ab")
    }
    options = {"max_loras": 2, "max_batch_size": 4, "max_input_len": 300, "max_seq_len": 340}
    manifest = quick_build(
        tiny_config(model, tmp_path / "engine", target_modules=TARGETS, **options)
    )
    assert {site.path.split("layers.0.")[-1] for site in manifest.sites} > {
        "mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.up_proj",
    }  # fmt: skip
    names, lengths, steps = ("a", "", "b", "a"), (1, 7, 33, 300), 32
    rng, reference = np.random.default_rng(0), PeftReference(model, adapters)
    rows = [rng.integers(3, 64, length + steps) for length in lengths]
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        for name, path in adapters.items():
            engine.adapters.register(name, path)
        found = logits_in_a_batch(engine, names, rows, steps)
    for name, row, logits in zip(names, rows, found, strict=True):
        expected = reference.logits(name, row[None], np.ones((1, row.size), np.int64))[0]
        np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.slow
def test_codes_are_of_other_linears_than_routers(tmp_path: Path) -> None:
    model = mixture("Qwen2Moe", tmp_path)
    options: dict[str, Any] = {"quantize": "int8", "quantize_level": "exact", "quantize_block": 16}
    options["target_modules"] = TARGETS
    manifest = quick_build(tiny_config(model, tmp_path / "engine", **options))
    assert "model.layers.0.mlp.shared_expert.up_proj" in manifest.weights
    assert [path for path in manifest.weights if path.endswith("mlp.gate")] == []
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        found = engine_logits(engine, manager, "")
    codes = coded_weights(ir.load(tmp_path / "engine" / ONNX_FILE))
    weights = {path: weight.dequantised() for path, weight in codes}
    expected = PeftReference(model, {}, weights=weights).logits("", *batch())
    assert largest_error(found, expected) < 1e-4


@pytest.mark.slow
def test_tensorrt_builds_a_mixture(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    model = mixture("Qwen3Moe", tmp_path)
    options = {"flavour": "tensorrt-rtx", "dtype": "float16", "target_modules": TARGETS}
    manifest = quick_build(tiny_config(model, tmp_path / "engine", **options))
    assert (manifest.lora_plugin, len(manifest.sites)) == ("plugin", 10)
    assert manifest.files["engine.plan"].size_bytes > 0


@pytest.mark.slow
def test_an_engine_without_lora_of_experts_says_what_takes_it(tmp_path: Path) -> None:
    model = mixture("Qwen3Moe", tmp_path)
    manifest = quick_build(tiny_config(model, tmp_path / "engine", target_modules=TARGETS))
    assert {site.experts for site in manifest.sites} == {0}
    together = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = save_adapter(model, tmp_path / "a", target_modules=[], target_parameters=together)
    needed = pytest.raises(AdapterError, match=r"--lora-target-modules moe_gate_up moe_4h_to_h")
    with open_engine(tmp_path / "engine", "onnxruntime") as engine, needed:
        engine.adapters.load("a", adapter)


def test_experts_that_cannot_be_built_say_what_is_missing(tmp_path: Path) -> None:
    model = save_model("GptOss", tmp_path / "model", head_dim=8, **LOCAL)
    with pytest.raises(ModelError) as refusal:
        quick_build(tiny_config(model, tmp_path / "engine"))
    for words in ("gate and up are interleaved", "experts with biases", "attention has sinks"):
        assert words in str(refusal.value)
