"""Linears whose weights are equal keep sites of their own: an adapter for one is not another's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.tiny_models import ARCHITECTURES, save_adapter, save_model, tiny_config
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trt_lora.builder.export.attention import ATTENTION
from trt_lora.builder.export.causal_lm import export_causal_lm
from trt_lora.builder.passes.linears import find_linears
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.runtime import LoRAManager, open_engine
from trt_lora.scripts.verification.peft_reference import PeftReference

ADAPTERS: dict[str, Any] = {
    "k": {"target_modules": ["k_proj"]},
    "v": {"target_modules": ["v_proj"]},
    "all": {},
}


@dataclass(frozen=True)
class EqualEngine:
    """A model in which v_proj is k_proj, up_proj is gate_proj, and layer 1 reads as layer 0."""

    model: Path
    engine: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> EqualEngine:
    folder = tmp_path_factory.mktemp("equal")
    with suppress_output():
        model: Any = AutoModelForCausalLM.from_pretrained(save_model("Llama", folder / "other"))
        first, second = model.model.layers
        first.self_attn.v_proj.load_state_dict(first.self_attn.k_proj.state_dict())
        first.mlp.up_proj.load_state_dict(first.mlp.gate_proj.state_dict())
        second.load_state_dict(first.state_dict())
        model.save_pretrained(folder / "model")
    adapters = {
        name: save_adapter(folder / "model", folder / name, seed=seed, r=4, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    quick_build(tiny_config(folder / "model", folder / "engine"))
    return EqualEngine(folder / "model", folder / "engine", adapters)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_for_one_of_two_equal_linears_is_peft_s(equal: EqualEngine, name: str) -> None:
    reference = PeftReference(equal.model, equal.adapters)
    with open_engine(equal.engine) as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights(name, equal.adapters[name])
        ours, base = (engine_logits(engine, manager, which) for which in (name, ""))
    assert largest_error(ours, reference.logits(name, *batch())) < 1e-4
    assert largest_error(base, ours) > 0.1


def test_linears_that_share_one_parameter_have_sites_of_their_own() -> None:
    config = LlamaConfig(**ARCHITECTURES["Llama"])
    llama: Any = LlamaForCausalLM
    with suppress_output():
        model = llama._from_config(config, attn_implementation=ATTENTION)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    exported = export_causal_lm(model, 16)
    paths = [linear.path for linear in find_linears(exported.model) if not linear.refusal]
    linears = [path for path, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    assert sorted(paths) == sorted(linears)
