"""Blends and strengths: the deltas of PEFT's `cat` and `set_scale`, and a manager left whole."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft.tuners.lora import LoraLayer
from safetensors.numpy import save_file
from support.adapters.blended_adapters import assert_near, delta, product, random_pair
from support.adapters.manager_setup import (
    MANIFEST,
    SITE,
    A,
    B,
    manager_with,
    pair,
    refreshed,
    state_of,
)
from support.fakes.fake_engine import FakeExecutor, make_manifest
from support.models.tiny_models import save_adapter, save_model

from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import AdapterError, LoRAError, UnknownAdapterError
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.needs_torch

ELSEWHERE = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Tiny:
    """A tiny model with adapters of other modules, ranks and scales; its linears as sites."""

    model: Path
    adapters: dict[str, Path]
    manifest: Manifest

    def peft(self) -> Any:
        return PeftReference(self.model, self.adapters).model

    def manager(self) -> LoRAManager:
        manager = LoRAManager()
        manager.initialize_engine_bindings(FakeExecutor(self.manifest))
        for name, path in self.adapters.items():
            manager.load_weights(name, path)
        return manager


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    model = save_model("Llama", folder / "model")
    options: dict[str, dict[str, Any]] = {
        "a": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "up_proj"]},
        "b": {"r": 2, "use_rslora": True, "target_modules": ["q_proj", "k_proj"]},
        "c": {"r": 3, "lora_alpha": 1, "target_modules": ["down_proj", "q_proj"]},
    }
    adapters = {
        name: save_adapter(model, folder / name, seed=seed, **fields)
        for seed, (name, fields) in enumerate(options.items())
    }
    sizes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (32, 16),
        "self_attn.v_proj": (32, 16),
        "mlp.up_proj": (32, 48),
        "mlp.down_proj": (48, 32),
    }
    sites = tuple(
        Site(f"model.layers.{i}.{path}", k, n, "float32")
        for i in (0, 1)
        for path, (k, n) in sizes.items()
    )
    return Tiny(model, adapters, replace(make_manifest(), sites=sites))


def peft_deltas(model: Any, adapter: str) -> dict[str, Array]:
    """[k, n] of every site that PEFT adapts."""
    layers: list[tuple[str, Any]] = [
        (name.removeprefix("base_model.model."), layer)
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    ]
    return {
        path: layer.get_delta_weight(adapter).detach().numpy().T
        for path, layer in layers
        if adapter in layer.lora_A
    }


def assert_as_peft(manager: LoRAManager, tiny: Tiny, expected: dict[str, Array]) -> None:
    assert any(np.abs(values).max() > 0.1 for values in expected.values())
    for site in tiny.manifest.sites:
        values = expected.get(site.path, np.zeros((site.k, site.n)))
        np.testing.assert_allclose(delta(manager, site.path), values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "parts",
    # PEFT gives the sum the config of the first part: with rsLoRA first, its scale would not be 1.
    [{"a": 0.7, "b": 0.3}, {"a": -2.0, "b": 1.0}, {"a": 0.5, "b": 0.25, "c": 3.0}, {"c": 2.0}],
)
def test_a_blend_is_pefts_sum_of_weighted_adapters(tiny: Tiny, parts: dict[str, float]) -> None:
    model = tiny.peft()
    model.add_weighted_adapter(list(parts), list(parts.values()), "sum", combination_type="cat")
    manager = tiny.manager()
    manager.blend("sum", parts)
    manager.switch_weights("sum")
    assert_as_peft(manager, tiny, peft_deltas(model, "sum"))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, -1.5, 3.0])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_strength_is_pefts_scale(tiny: Tiny, name: str, strength: float) -> None:
    model = tiny.peft()
    own = peft_deltas(model, name)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_scale(name, strength)
    manager = tiny.manager()
    manager.switch_weights(name, scale=strength)
    expected = peft_deltas(model, name)
    for site in tiny.manifest.sites:
        values = expected.get(site.path, np.zeros((site.k, site.n)))
        np.testing.assert_allclose(values, strength * own.get(site.path, values), atol=1e-5)
        np.testing.assert_allclose(delta(manager, site.path), values, rtol=0, atol=1e-5)


def test_a_blend_before_an_engine_is_the_blend_after(tiny: Tiny) -> None:
    manager = LoRAManager()
    for name, path in tiny.adapters.items():
        manager.load_weights(name, path)
    assert manager.blend("sum", {"a": 0.7, "b": 0.3}) is None
    manager.switch_weights("sum")
    manager.initialize_engine_bindings(FakeExecutor(tiny.manifest))
    model = tiny.peft()
    model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "sum", combination_type="cat")
    assert_as_peft(manager, tiny, peft_deltas(model, "sum"))
    coverage = manager.get_coverage("sum")
    assert coverage is not None
    assert {site.rank for site in coverage.adapted} == {2, 4, 6}


@pytest.mark.parametrize("bound", [True, False])
def test_adapters_of_other_sites_are_side_by_side_in_a_blend(bound: bool) -> None:
    weights = {"a": random_pair(0), "b": random_pair(1, path=ELSEWHERE)}
    manager = manager_with(bound, a=weights["a"], b=weights["b"])
    manager.blend("both", {"a": 2, "b": 0.5})
    manager.switch_weights("both")
    if not bound:
        manager.initialize_engine_bindings(FakeExecutor(MANIFEST))
    assert_near(delta(manager, SITE), 2 * product(weights["a"]))
    assert_near(delta(manager, ELSEWHERE), 0.5 * product(weights["b"], ELSEWHERE))


def test_the_ranks_of_a_blend_add_up_site_by_site() -> None:
    manager = manager_with(
        a=random_pair(0, 3), b=random_pair(1, 13), c=random_pair(2, 1, ELSEWHERE)
    )
    coverage = manager.blend("sum", {"a": 1, "b": 1, "c": 1})
    assert coverage is not None
    assert {s.path: s.rank for s in coverage.adapted} == {SITE: 16, ELSEWHERE: 1}
    manager.switch_weights("sum")
    assert manager.get_active_weight(A).shape == (8, 16)
    assert manager.get_active_weight(B).shape == (16, 6)


def test_a_blend_leaves_its_parts_as_they_were() -> None:
    weights = {"a": random_pair(0), "b": random_pair(1)}
    manager = manager_with(a=weights["a"], b=weights["b"])
    manager.switch_weights("a")
    before = list(refreshed(manager).items())
    manager.blend("sum", {"a": 0.5, "b": 0.5})
    assert manager.get_active_adapter_name() == "a"
    assert list(refreshed(manager).items()) == before
    manager.switch_weights("sum")
    manager.switch_weights("a")
    assert list(refreshed(manager).items()) == before
    np.testing.assert_array_equal(manager.get_active_weight(B).numpy(), weights["a"][B])


@pytest.mark.parametrize("bound", [True, False])
def test_a_blend_of_a_blend_is_the_sum_of_all(bound: bool) -> None:
    weights = {"a": random_pair(0), "b": random_pair(1), "c": random_pair(2)}
    manager = manager_with(bound, **weights)
    manager.blend("ab", {"a": 0.5, "b": -1})
    manager.blend("abc", {"ab": 4, "c": 3, "a": 1})
    manager.switch_weights("abc", scale=0.5)
    if not bound:
        manager.initialize_engine_bindings(FakeExecutor(MANIFEST))
    a, b, c = (product(weights[name]) for name in "abc")
    assert_near(delta(manager, SITE), 0.5 * (4 * (0.5 * a - b) + 3 * c + a))
    assert manager.get_active_weight(A).shape == (8, 8)


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("weight", [0.5, 1])
def test_a_blend_of_one_part_holds_nothing_of_it(bound: bool, weight: float) -> None:
    manager = manager_with(bound, a=random_pair(0))
    manager.blend("part", {"a": weight})
    manager.switch_weights("a")
    first = [manager.get_active_weight(name).owner for name in (A, B)]
    manager.switch_weights("part")
    for name in (A, B):
        assert all(manager.get_active_weight(name).owner is not owner for owner in first)


def refused(manager: LoRAManager, error: type[LoRAError], message: str, **parts: float) -> None:
    """A blend that is refused leaves the manager as it was."""
    before = state_of(manager)
    with pytest.raises(error, match=message):
        manager.blend("sum", parts)
    assert state_of(manager) == before


def test_ranks_beyond_the_maximum_of_the_engine_are_refused() -> None:
    manager = manager_with(a=random_pair(0, 9), b=random_pair(1, 8))
    manager.switch_weights("a")
    refused(manager, AdapterError, "rank 17; this engine takes 1 to 16", a=1, b=1)


def test_an_unknown_part_is_refused() -> None:
    manager = manager_with(a=random_pair(0))
    refused(manager, UnknownAdapterError, "unknown adapter 'b'; loaded: a", a=1, b=1)


def test_a_taken_name_no_name_and_no_parts_are_refused() -> None:
    manager = manager_with(a=random_pair(0), sum=random_pair(1))
    refused(manager, AdapterError, "named 'sum' is loaded already", a=1)
    manager = manager_with(a=random_pair(0))
    refused(manager, AdapterError, "has no parts")
    with pytest.raises(AdapterError, match="needs a name"):
        manager.blend("", {"a": 1})


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(weight: float) -> None:
    manager = manager_with(a=random_pair(0), b=random_pair(1))
    refused(manager, AdapterError, f"a scale is {weight}", a=1, b=weight)


def test_a_weight_that_leaves_the_range_of_the_engine_is_refused() -> None:
    manager = manager_with(a=random_pair(0), b=random_pair(1))
    refused(manager, AdapterError, "beyond the range of float32", a=1e39)
    refused(manager, AdapterError, "lora_B", a=1e30, b=1e39)


def test_a_factor_without_its_other_is_refused_before_an_engine_is_bound() -> None:
    manager = manager_with(False, a={A: pair()[A]})
    with pytest.raises(AdapterError, match="has no B"):
        manager.blend("sum", {"a": 1})
    assert manager.get_adapter_names() == ["a"]


@pytest.mark.parametrize("shape", [(9, 2), (1, 2)])
def test_parts_of_other_shapes_are_refused_before_an_engine_is_bound(
    shape: tuple[int, int],
) -> None:
    """One of them is for another model; numpy would broadcast a single row."""
    other = {A: np.ones(shape, np.float32), B: np.ones((2, 6), np.float32)}
    manager = manager_with(False, a=pair(), b=other)
    with pytest.raises(AdapterError, match="shape"):
        manager.blend("sum", {"a": 1, "b": 1})
    assert manager.get_adapter_names() == ["a", "b"]


def test_wrong_ranks_that_make_up_for_each_other_are_refused_before_an_engine_is_bound() -> None:
    """A's and B's ranks differ in both parts; their sums agree."""
    ones = np.ones((8, 6), np.float32)
    parts = {"a": {A: ones[:, :2], B: ones[:3]}, "b": {A: ones[:, :3], B: ones[:2]}}
    manager = LoRAManager()
    for name, weights in parts.items():
        manager.add_weights(name, {n: w.copy() for n, w in weights.items()})
    with pytest.raises(AdapterError, match="rank"):
        manager.blend("sum", {"a": 1, "b": 1})


def test_a_blend_of_an_adapter_that_leaves_tensors_out_leaves_them_out_too(tmp_path: Path) -> None:
    weights = random_pair(0) | random_pair(1, path="model.layers.0.mlp.up_proj")
    save_file(weights, tmp_path / "a.safetensors")
    manager = LoRAManager()
    manager.load_weights("a", tmp_path / "a.safetensors", strict=False)
    manager.blend("half", {"a": 0.5})
    manager.initialize_engine_bindings(FakeExecutor(MANIFEST))
    manager.switch_weights("half")
    assert_near(delta(manager, SITE), 0.5 * product(weights))
