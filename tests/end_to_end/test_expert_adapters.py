"""LoRA of experts, end to end: every answer is PEFT's, on engines for one adapter and for many."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from safetensors.numpy import load_file, save_file
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.mixtures import ATTENTION, MIXTURES, WITH_EXPERTS, expert_parameters, mixture
from support.models.quick_build import quick_build
from support.models.slot_rows import logits_in_a_batch
from support.models.tiny_models import save_adapter, tiny_config
from transformers import AutoModelForCausalLM

from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.build_log import Kernel
from trt_lora.builder.tensorrt.kernel_counts import kernel_layouts
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import LoRAManager, load_adapter, open_engine
from trt_lora.runtime import save_adapter as save_adapter_file
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.verification.deltas import delta_errors, engine_factors
from trt_lora.scripts.verification.peft_reference import PeftReference

Logits = npt.NDArray[np.float32]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LAYER = "base_model.model.model.layers.{}.mlp.experts.{}.{}.lora_{}.weight"
OPTIONS = {"target_modules": WITH_EXPERTS}


def adapter_of_experts(model: Path, folder: Path, architecture: str, **options: Any) -> Path:
    """Attention, router and both matrices of the experts; the ranks differ."""
    gate_up, down, router = expert_parameters(architecture)
    own: dict[str, Any] = {
        "target_modules": ATTENTION,
        "target_parameters": [gate_up, down, router],
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {down: 3},
    }
    return save_adapter(model, folder, **own | options)


def answers(engine: Path, adapters: Mapping[str, Path]) -> dict[str, Logits]:
    """The logits of `batch` with every adapter, and without one."""
    with open_engine(engine, "onnxruntime") as opened:
        manager = LoRAManager()
        manager.initialize_engine_bindings(opened)
        for name, path in adapters.items():
            manager.load_weights(name, path)
        return {name: engine_logits(opened, manager, name) for name in ("", *adapters)}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in MIXTURES if name != "Qwen3Moe"])
def test_logits_are_those_of_peft(architecture: str, tmp_path: Path) -> None:
    model = mixture(architecture, tmp_path)
    adapter = adapter_of_experts(model, tmp_path / "a", architecture)
    manifest = quick_build(tiny_config(model, tmp_path / "engine", **OPTIONS))
    assert sum(site.experts > 0 for site in manifest.sites) == 4  # of two layers
    reference = PeftReference(model, {"a": adapter})
    found = answers(tmp_path / "engine", {"a": adapter})
    for name, logits in found.items():
        assert largest_error(logits, reference.logits(name, *batch())) < 1e-4
    assert largest_error(found[""], found["a"]) > 0.1
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        engine.adapters.load("a", adapter)
        errors = delta_errors(engine_factors(engine.adapters, "a"), reference.factors("a"))
    assert errors.keys() == {site.path for site in manifest.sites if "shared" not in site.path}
    assert max(errors.values()) < 1e-5
    save_adapter_file(load_adapter(adapter), tmp_path / "again", "peft")
    written = PeftReference(model, {"again": tmp_path / "again"})
    assert largest_error(found["a"], written.logits("again", *batch())) < 1e-4


def of_two_experts(folder: Path, adapter: Path) -> Path:
    """The adapter with zeros for all experts but the second and the sixth."""
    folder.mkdir()
    tensors = load_file(adapter / WEIGHTS)
    for name, values in tensors.items():
        if ".experts" in name and ".lora_A" in name:
            apart = values.reshape(8, -1, values.shape[1])
            apart[[0, 2, 3, 4, 6, 7]] = 0
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_bytes((adapter / CONFIG).read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("max_loras", [0, 2])
def test_prompts_of_all_lengths_and_many_steps(max_loras: int, tmp_path: Path) -> None:
    """With slots, rows of one batch have other adapters: one for all experts, one for two."""
    model = mixture("Qwen3Moe", tmp_path)
    adapters = {"a": adapter_of_experts(model, tmp_path / "a", "Qwen3Moe")}
    other = adapter_of_experts(model, tmp_path / "all", "Qwen3Moe", seed=1)
    adapters["b"] = of_two_experts(tmp_path / "b", other)
    options = {"max_loras": max_loras, "max_batch_size": 4, "max_input_len": 300}
    config = tiny_config(model, tmp_path / "engine", max_seq_len=340, **OPTIONS | options)
    quick_build(config)
    names, lengths, steps = ("a", "", "b", "a") if max_loras else ("a",) * 4, (1, 7, 33, 300), 32
    rng, reference = np.random.default_rng(0), PeftReference(model, adapters)
    rows = [rng.integers(3, 64, length + steps) for length in lengths]
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        for name, path in adapters.items():
            engine.adapters.register(name, path)
        found = logits_in_a_batch(engine, names, rows, steps)
    for name, row, logits in zip(names, rows, found, strict=True):
        expected = reference.logits(name, row[None], np.ones((1, row.size), np.int64))[0]
        np.testing.assert_allclose(logits, expected, atol=1e-4)


# ----------------------------------------------------------------------------- which experts answer


def with_routers(model: Path, folder: Path, rows: list[int]) -> Path:
    """The model whose routers have for each expert the row of another, or zeros for all."""
    base: Any = AutoModelForCausalLM.from_pretrained(model)
    for layer in base.model.layers:
        weight = layer.mlp.gate.weight
        weight.data = weight.data[rows].clone() if rows else torch.zeros_like(weight)
    base.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_experts_with_equal_logits_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    """Pairs of experts have one row of the router: the best two are always equals."""
    rows = [0, 0, 2, 2, 4, 4, 6, 6]
    model = with_routers(mixture("Qwen3Moe", tmp_path), tmp_path / "pairs", rows)
    gate_up, down, _ = expert_parameters("Qwen3Moe")
    targets = {"target_parameters": [gate_up, down], "rank_pattern": {}}
    adapter = adapter_of_experts(model, tmp_path / "a", "Qwen3Moe", **targets)
    quick_build(tiny_config(model, tmp_path / "engine", **OPTIONS))
    reference = PeftReference(model, {"a": adapter})
    for name, logits in answers(tmp_path / "engine", {"a": adapter}).items():
        assert largest_error(logits, reference.logits(name, *batch())) < 1e-4


def write_of_single_experts(folder: Path, experts: list[int], zeros: int = 0) -> Path:
    """Linears of single experts, as older releases of transformers have them.

    Args:
        folder: to write.
        experts: that are adapted.
        zeros: if given, the number of experts, of which the others get zeros.
    """
    tensors = {}
    for layer in range(2):
        for name, k, n in (("gate_proj", 32, 24), ("up_proj", 32, 24), ("down_proj", 24, 32)):
            for expert in range(zeros) if zeros else experts:
                rng = np.random.default_rng([layer, expert, n, len(name)])
                scale = np.float32(0.2 * (expert in experts))
                for factor, shape in (("A", (2, k)), ("B", (n, 2))):
                    values = rng.standard_normal(shape, np.float32) * scale
                    tensors[LAYER.format(layer, expert, name, factor)] = values
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
    config |= {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_an_adapter_shows_where_its_experts_are_taken(tmp_path: Path) -> None:
    """All logits of the router are equal: every token takes the first two experts."""
    model = with_routers(mixture("Qwen3Moe", tmp_path), tmp_path / "equal", [])
    quick_build(tiny_config(model, tmp_path / "engine", **OPTIONS))
    adapters = {
        "taken": write_of_single_experts(tmp_path / "taken", [1, 7]),
        "idle": write_of_single_experts(tmp_path / "idle", [2, 7]),
    }
    found = answers(tmp_path / "engine", adapters)
    assert largest_error(found[""], found["taken"]) > 0.1
    np.testing.assert_array_equal(found[""], found["idle"])


@pytest.mark.slow
def test_linears_of_single_experts_are_what_peft_makes_of_them(tmp_path: Path) -> None:
    """PEFT makes one parameter of them too; two of eight experts are adapted."""
    model = mixture("Qwen3Moe", tmp_path)
    adapter = write_of_single_experts(tmp_path / "two", [2, 5])
    by_adapter: dict[str, Any] = {"target_modules": (), "lora_dirs": (adapter,)}
    config = tiny_config(model, tmp_path / "engine", max_lora_rank=None, **by_adapter)
    assert quick_build(config).max_lora_rank == 4  # gate and up together
    whole = write_of_single_experts(tmp_path / "whole", [2, 5], zeros=8)
    reference = PeftReference(model, {"two": whole})
    found = answers(tmp_path / "engine", {"two": adapter})
    assert largest_error(found["two"], reference.logits("two", *batch())) < 1e-4
    assert largest_error(found["two"], found[""]) > 0.1


@contextmanager
def peft_before_0_20() -> Iterator[None]:
    """PEFT that takes the second dimension of a parameter for its input, as it did."""
    original = ParamWrapper.update_layer

    def update_layer(self: Any, *args: Any, **kwargs: Any) -> None:
        self.get_base_layer().is_transposed = True  # "it already is [E, in, out]"
        original(self, *args, **kwargs)
        self.get_base_layer().is_transposed = False

    with patch.object(ParamWrapper, "update_layer", update_layer):
        yield


@pytest.mark.slow
def test_files_of_earlier_releases_of_peft_lie_the_other_way(tmp_path: Path) -> None:
    model = mixture("Qwen3Moe", tmp_path)
    gate_up = {"target_parameters": ["mlp.experts.gate_up_proj"], "rank_pattern": {}}
    quick_build(tiny_config(model, tmp_path / "engine", **OPTIONS))
    with peft_before_0_20():
        adapters = {
            "both": adapter_of_experts(model, tmp_path / "both", "Qwen3Moe"),
            "one": adapter_of_experts(model, tmp_path / "one", "Qwen3Moe", **gate_up),
        }
        expected = {
            name: PeftReference(model, {name: path}).logits(name, *batch())
            for name, path in adapters.items()
        }
    config = json.loads((adapters["one"] / CONFIG).read_text())
    (adapters["one"] / CONFIG).write_text(json.dumps(config | {"peft_version": "0.19.1"}))
    found = answers(tmp_path / "engine", adapters)
    for name, logits in expected.items():
        assert largest_error(found[name], logits) < 1e-4


# ----------------------------------------------------------------------------------------- TensorRT


def plan(folder: Path, **options: Any) -> tuple[Manifest, list[Kernel]]:
    """An engine with a plan, and the kernels of its decode profile."""
    model = mixture("Qwen3Moe", folder)
    targets = {"target_modules": WITH_EXPERTS, "flavour": "tensorrt-rtx", "dtype": "float16"}
    manifest = quick_build(tiny_config(model, folder / "engine", **targets | options))
    layouts = kernel_layouts(folder / "engine", manifest, NoProgress(), "decode")
    found = {layout.name: list(layout.kernels) for layout in layouts}
    return manifest, found["plugin"]


@pytest.mark.slow
@pytest.mark.parametrize("max_loras", [0, 2])
def test_a_plan_has_two_nodes_of_experts_a_layer(max_loras: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    manifest, kernels = plan(tmp_path, max_loras=max_loras, max_batch_size=1)
    assert (manifest.lora_plugin, sum(site.experts > 0 for site in manifest.sites)) == ("plugin", 4)
    of_lora = [kernel.name for kernel in kernels if kernel.name.startswith("lora_")]
    assert sum(".experts" in name for name in of_lora) == 4
    assert len(of_lora) == 10  # and attention's two and the router's a layer
    assert len(kernels) < 60


@pytest.mark.slow
def test_without_the_plugin_a_plan_has_no_lora_of_experts(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    model = mixture("Qwen3Moe", tmp_path)
    options = {"flavour": "tensorrt-rtx", "lora_plugin": "native", **OPTIONS}
    with pytest.raises(ConfigError, match=r"moe_4h_to_h is of experts.*--flavour none"):
        quick_build(tiny_config(model, tmp_path / "engine", **options))
