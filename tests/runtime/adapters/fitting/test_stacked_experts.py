"""Adapters of experts fitted to an engine that takes them, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters.expert_files import (
    PATH,
    SIZES,
    E,
    I,
    deltas,
    expert_manifest,
    expert_pairs,
    flat,
    write_single_experts,
    write_wrappers,
)
from support.fakes.fake_engine import make_manifest, write_peft
from support.refusals import refused

from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.blend import blend_adapters
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.adapters.shard import shard_adapter
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.store.slot_level import _slots_within
from trt_lora.runtime.store.slot_stacks import SlotStacks, slot_nbytes

NAMES = ("gate_proj", "up_proj", "down_proj")
OTHER_NAMES = ("w1", "w3", "w2")


def of_sites(fitted: Fitted) -> dict[str, Array]:
    """A @ B of every expert, by site."""
    values = {name: tensor.numpy().astype(np.float64) for name, tensor in fitted.tensors.items()}
    sites = (f"{PATH}.{name}" for name in SIZES)
    return {s: values[f"lora_A_{s}"] @ values[f"lora_B_{s}"] for s in sites}


def check(fitted: Fitted, expected: dict[str, Array]) -> None:
    for site, values in of_sites(fitted).items():
        np.testing.assert_allclose(values, expected[site], atol=1e-5)


@pytest.mark.parametrize("names", [NAMES, OTHER_NAMES])
def test_linears_of_single_experts_become_matrices_of_all(
    names: tuple[str, str, str], tmp_path: Path
) -> None:
    pairs = expert_pairs()
    folder = write_single_experts(tmp_path / "a", pairs, range(E), names)
    fitted = fit_adapter(load_adapter(folder), expert_manifest())
    check(fitted, deltas(pairs))
    ranks = [site.rank for site in fitted.coverage.sites]
    assert ranks == [4, 2]  # of gate and up together
    assert not fitted.coverage.unexpected_keys


def test_experts_that_are_left_out_get_zeros(tmp_path: Path) -> None:
    pairs = expert_pairs()
    folder = write_single_experts(tmp_path / "a", pairs, [2], NAMES)
    expected = deltas(pairs)
    for values in expected.values():
        values[:2] = 0
    check(fit_adapter(load_adapter(folder), expert_manifest()), expected)


def test_gate_and_up_may_have_other_ranks(tmp_path: Path) -> None:
    folder = write_single_experts(tmp_path / "a", expert_pairs(), range(E), NAMES)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, values in tensors.items():
        if ".up_proj.lora_A" in name:
            tensors[name] = np.concatenate([values, np.ones_like(values[:1])])
        elif ".up_proj.lora_B" in name:
            tensors[name] = np.concatenate([values, np.ones_like(values[:, :1])], axis=1)
    save_file(tensors, file)
    config = folder / "adapter_config.json"
    pattern = '"rank_pattern": {"up_proj": 3}, "alpha_pattern": {"up_proj": 9}, '
    config.write_text(config.read_text().replace("{", "{" + pattern, 1))
    found = of_sites(fit_adapter(load_adapter(folder), expert_manifest()))
    expected = deltas(expert_pairs())[f"{PATH}.gate_up_proj"]
    expected[..., I:] += 3  # all ones, times the scale
    np.testing.assert_allclose(found[f"{PATH}.gate_up_proj"], expected, atol=1e-5)


def test_rows_of_tensorrt_llm_hold_gate_up_and_down(tmp_path: Path) -> None:
    pairs = expert_pairs()
    adapter = load_adapter(write_wrappers(tmp_path / "in", *map(flat, pairs.values())))
    save_adapter(adapter, tmp_path / "out", "trtllm")
    config = np.load(tmp_path / "out/model.lora_config.npy")
    assert config[0, :, 0].tolist() == [13, 14, 15]
    row = np.load(tmp_path / "out/model.lora_weights.npy")[0, 1]
    a, b = pairs["down_proj"]
    np.testing.assert_array_equal(row[: a.size], a.swapaxes(1, 2).ravel())  # [E, r, k]
    np.testing.assert_allclose(row[a.size :][: b.size], 3 * b.swapaxes(1, 2).ravel())  # [E, n, r]
    manifest = expert_manifest()
    check(fit_adapter(load_adapter(tmp_path / "out", manifest), manifest), deltas(pairs))


def test_a_blend_and_a_strength_are_those_of_every_expert(tmp_path: Path) -> None:
    pairs = expert_pairs()
    adapter = load_adapter(write_wrappers(tmp_path, *map(flat, pairs.values())))
    blend = blend_adapters("both", [(adapter, 0.5), (adapter, 2.0)])
    fitted = fit_adapter(blend, expert_manifest())
    check(fitted, {site: 2.5 * delta for site, delta in deltas(pairs).items()})
    assert [site.rank for site in fitted.coverage.sites] == [4, 4]


def test_a_slot_holds_every_expert_and_is_counted_in_bytes(tmp_path: Path) -> None:
    pairs, manifest = expert_pairs(), expert_manifest(slots=2)
    adapter = load_adapter(write_wrappers(tmp_path, *map(flat, pairs.values())))
    stacks = SlotStacks(manifest, HostMemory())
    stacks.place(1, fit_adapter(adapter, manifest))
    site = f"{PATH}.down_proj"
    (a, b), views = pairs["down_proj"], stacks.views(0, 2)
    stack_of_a, stack_of_b = (views[f"lora_{factor}_{site}"].numpy() for factor in "AB")
    assert stack_of_a.shape == (2, E, *a.shape[1:2], manifest.max_lora_rank)
    np.testing.assert_array_equal(stack_of_a[1, ..., :2], a)
    np.testing.assert_allclose(stack_of_b[1, :, :2], 3 * b)
    assert not stack_of_a[0].any()
    assert not stack_of_a[1, ..., 2:].any()
    values = sum(E * (k + n) * manifest.max_lora_rank * 4 for k, n in SIZES.values())
    assert slot_nbytes(manifest) >= values
    with refused(ConfigError, f"one slot of this engine takes {slot_nbytes(manifest):,}"):
        _slots_within(100 / HostMemory().free_bytes(), manifest, HostMemory())


# ----------------------------------------------------------------------------------------- refused


def test_an_engine_without_experts_says_how_to_build_one(tmp_path: Path) -> None:
    adapter = load_adapter(write_wrappers(tmp_path, *map(flat, expert_pairs().values())))
    with refused(AdapterError, "--lora-target-modules moe_gate_up moe_4h_to_h", "--lora-dir"):
        fit_adapter(adapter, make_manifest())


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    adapter = load_adapter(write_wrappers(tmp_path, *map(flat, expert_pairs().values())))
    with refused(AdapterError, "is of 3 experts", f"{PATH}.gate_up_proj has 4", "another base"):
        fit_adapter(adapter, expert_manifest(experts=4))
    single = write_single_experts(tmp_path / "a", expert_pairs(), range(E), NAMES)
    with refused(AdapterError, "it is of expert 2, and the engine's are 0 to 1"):
        fit_adapter(load_adapter(single), expert_manifest(experts=2))


def test_a_value_that_is_none_is_refused_with_its_expert(tmp_path: Path) -> None:
    pairs = expert_pairs()
    pairs["down_proj"][1][2, 0, 0] = np.nan
    adapter = load_adapter(write_wrappers(tmp_path, *map(flat, pairs.values())))
    with refused(AdapterError, f"{PATH}.lora_B.weight, expert 2 holds NaN"):
        fit_adapter(adapter, expert_manifest())


def changed(folder: Path, drop: str, **more: Array) -> Path:
    """The adapter without the tensors whose names contain a text, and with others."""
    file = folder / "adapter_model.safetensors"
    tensors = {name: values for name, values in load_file(file).items() if drop not in name}
    save_file(tensors | {name.replace("__", "."): value for name, value in more.items()}, file)
    return folder


def test_gate_without_up_is_refused(tmp_path: Path) -> None:
    folder = write_single_experts(tmp_path / "a", expert_pairs(), range(E), NAMES)
    with refused(AdapterError, "moe_gate is missing", "experts.0.gate_proj.lora_A"):
        fit_adapter(load_adapter(changed(folder, "up_proj")), expert_manifest())


def test_a_factor_of_one_expert_without_the_other_is_refused(tmp_path: Path) -> None:
    """A of experts 0 and 2, B of experts 0 and 1."""
    folder = write_single_experts(tmp_path / "a", expert_pairs(), range(E), NAMES)
    changed(changed(folder, "1.down_proj.lora_A"), "2.down_proj.lora_B")
    with refused(AdapterError, "1.down_proj has no site in this engine: its A is missing"):
        fit_adapter(load_adapter(folder), expert_manifest())


def test_ranks_that_differ_by_expert_are_refused(tmp_path: Path) -> None:
    folder = write_single_experts(tmp_path / "a", expert_pairs(), range(E), NAMES)
    name = f"base_model.model.{PATH}.1.down_proj"
    changed(
        folder,
        "experts.1.down_proj",
        **{
            f"{name}.lora_A.weight": np.ones((1, I), np.float32),
            f"{name}.lora_B.weight": np.ones((SIZES["down_proj"][1], 1), np.float32),
        },
    )
    config = folder / "adapter_config.json"
    pattern = '"rank_pattern": {"experts.1.down_proj": 1}, '
    config.write_text(config.read_text().replace("{", "{" + pattern, 1))
    with refused(AdapterError, "other ranks or shapes: [1, 2]"):
        fit_adapter(load_adapter(folder), expert_manifest())


def test_two_layouts_in_one_file_are_refused(tmp_path: Path) -> None:
    pairs = expert_pairs()
    folder = write_wrappers(tmp_path / "a", *map(flat, pairs.values()))
    single = write_single_experts(tmp_path / "b", pairs, range(E), NAMES)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | load_file(single / file.name), file)
    config = folder / "adapter_config.json"
    modules = json.dumps({"target_modules": NAMES})[1:-1]
    config.write_text(config.read_text().replace('"target_modules": []', modules))
    with refused(AdapterError, "two of its tensors are for one binding", "experts.0.gate_proj"):
        fit_adapter(load_adapter(folder), expert_manifest())


def test_experts_are_not_sharded(tmp_path: Path) -> None:
    adapter = load_adapter(write_wrappers(tmp_path, *map(flat, expert_pairs().values())))
    with refused(AdapterError, "experts are not divided among ranks"):
        shard_adapter(adapter, expert_manifest(), 0, 2)


def test_a_router_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    router = "model.layers.0.mlp.gate"
    manifest = replace(make_manifest(), sites=(Site(router, 8, 4, "float32"),))
    factors = {f"{router}.lora_A": np.ones((2, 8)), f"{router}.lora_B": np.ones((3, 2))}
    tensors = {name: values.astype(np.float32) for name, values in factors.items()}
    folder = write_peft(
        tmp_path / "a", tensors, target_modules=[], target_parameters=["mlp.gate.weight"]
    )
    with refused(AdapterError, f"{router}.lora_B.weight", "[3, 2]", "n=4"):
        fit_adapter(load_adapter(folder), manifest)
