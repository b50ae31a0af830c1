"""Every architecture, end to end: transformers -> engine -> logits, against PEFT."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.models.architecture_check import Logits, batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.tiny_models import ARCHITECTURES, save_adapter, save_model, tiny_config

from trt_lora.builder.build import list_sites
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.runtime import LoRAManager, open_engine
from trt_lora.scripts.verification.peft_reference import PeftReference


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_peft_through_every_switch(architecture: str, tmp_path: Path) -> None:
    model = save_model(architecture, tmp_path / "model")
    adapters = {
        "a": save_adapter(model, tmp_path / "a", seed=1, r=4, lora_alpha=8),
        "b": save_adapter(model, tmp_path / "b", seed=2, r=7, lora_alpha=3, use_rslora=True),
    }
    config = tiny_config(model, tmp_path / "engine")
    manifest = quick_build(config)
    assert {replace(site, parts=()) for site in manifest.sites} == set(list_sites(config).sites)
    reference = PeftReference(model, adapters)
    seen: dict[str, Logits] = {}
    with open_engine(tmp_path / "engine") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        for name, path in adapters.items():
            manager.load_weights(name, path)
        for name in ["", "a", "b", "", "a"]:
            ours = engine_logits(engine, manager, name)
            assert largest_error(ours, reference.logits(name, *batch())) < 1e-4
            assert np.array_equal(ours, seen.setdefault(name, ours))
    assert largest_error(seen[""], seen["a"]) > 0.1  # the adapters do something
    assert largest_error(seen["a"], seen["b"]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])  # without biases, and with
def test_half_precision_engines_stay_close_to_peft(architecture: str, tmp_path: Path) -> None:
    model = save_model(architecture, tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "a", r=4)
    quick_build(tiny_config(model, tmp_path / "engine", dtype="float16"))
    with open_engine(tmp_path / "engine") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("a", adapter)
        ours = engine_logits(engine, manager, "a")
    reference = PeftReference(model, {"a": adapter}).logits("a", *batch())
    assert 0 < largest_error(ours, reference) < 0.03


@pytest.mark.slow
def test_an_engine_with_edgellm_names_takes_adapters_in_either_spelling(tmp_path: Path) -> None:
    model = save_model("Llama", tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "a", r=4)
    manifest = quick_build(
        tiny_config(model, tmp_path / "engine", binding_names=BindingNames.EDGELLM)
    )
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in manifest.lora_bindings
    with open_engine(tmp_path / "engine") as engine:
        manager = LoRAManager()
        manager.load_weights("a", adapter)  # before the engine is known: our own spelling
        manager.initialize_engine_bindings(engine)
        ours = engine_logits(engine, manager, "a")
    reference = PeftReference(model, {"a": adapter}).logits("a", *batch())
    assert largest_error(ours, reference) < 1e-4


@pytest.mark.slow
def test_heads_whose_width_onnx_runtimes_own_attention_refuses_answer_as_in_peft(
    tmp_path: Path,
) -> None:
    """Of 12 numbers, which is no multiple of 8; OpenLLaMA-3B has 100."""
    fields = {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5}
    model = save_model("Olmo2", tmp_path / "model", **fields)
    adapter = save_adapter(model, tmp_path / "a", r=4)
    quick_build(tiny_config(model, tmp_path / "engine"))
    with open_engine(tmp_path / "engine") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("a", adapter)
        ours = engine_logits(engine, manager, "a")
    reference = PeftReference(model, {"a": adapter}).logits("a", *batch())
    assert largest_error(ours, reference) < 1e-4
