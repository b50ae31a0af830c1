"""`LoRAManager.switch_weights` at another strength."""

import numpy as np
import pytest
from support.adapters.blended_adapters import assert_near, delta, product, random_pair
from support.adapters.manager_setup import (
    MANIFEST,
    SITE,
    B,
    manager_with,
    pair,
    refreshed,
    state_of,
)
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.interfaces.edgellm import LoRAManager


def test_a_strength_of_one_is_the_adapter_in_place() -> None:
    manager = manager_with(a=random_pair(0))
    manager.switch_weights("a")
    before = list(refreshed(manager).items())
    manager.switch_weights("a", scale=1.0)
    assert list(refreshed(manager).items()) == before  # Tensor compares by identity
    manager.switch_weights("a", scale=2)
    manager.switch_weights("a")
    assert list(refreshed(manager).items()) == before


def test_another_strength_changes_b_alone() -> None:
    manager = manager_with(a=make_weights(MANIFEST))
    manager.switch_weights("a")
    before = refreshed(manager)
    manager.switch_weights("a", scale=0.5)
    for name, tensor in refreshed(manager).items():
        scale = 0.5 if MANIFEST.lora_bindings[name][1] == "B" else 1
        np.testing.assert_array_equal(tensor.numpy(), scale * before[name].numpy())


def test_the_second_switch_to_a_strength_makes_nothing_new() -> None:
    manager = manager_with(a=random_pair(0), b=random_pair(1))
    manager.switch_weights("a", scale=0.5)
    before = list(refreshed(manager).items())
    manager.switch_weights("b")
    manager.switch_weights("a")
    manager.reset_weights()
    manager.switch_weights("a", scale=0.5)
    assert list(refreshed(manager).items()) == before


def test_every_strength_is_of_the_weights_as_loaded() -> None:
    weights = random_pair(0)
    manager = manager_with(a=weights)
    for scale in (0.0, 1e-3, 7.0, -1.0, 1.0, 0.5):
        manager.switch_weights("a", scale=scale)
        assert_near(delta(manager, SITE), scale * product(weights))
    np.testing.assert_array_equal(weights[B], random_pair(0)[B])  # nor are they written to


def test_a_strength_given_before_an_engine_is_bound_is_kept() -> None:
    weights = random_pair(0)
    manager = manager_with(False, a=weights)
    manager.switch_weights("a", scale=0.5)
    assert manager.get_active_adapter_name() == "a"
    np.testing.assert_allclose(manager.get_active_weight(B).numpy(), weights[B] * np.float32(0.5))
    manager.initialize_engine_bindings(FakeExecutor(MANIFEST))
    assert_near(delta(manager, SITE), 0.5 * product(weights))


def test_a_strength_of_a_half_precision_engine_is_rounded_once() -> None:
    weights = {name: array.astype(np.float16) for name, array in random_pair(0).items()}
    manager = LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(make_manifest(dtype="float16")))
    manager.add_weights("a", weights)
    manager.switch_weights("a", scale=0.3)
    exact = weights[B].astype(np.float32) * np.float32(0.3)
    np.testing.assert_array_equal(manager.get_active_weight(B).numpy(), exact.astype(np.float16))


def test_a_strength_beyond_float16_is_refused_and_the_active_adapter_stays() -> None:
    half = {name: array.astype(np.float16) for name, array in pair(value=100).items()}
    manager = LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(make_manifest(dtype="float16")))
    manager.add_weights("a", half)
    manager.add_weights("b", {name: array.copy() for name, array in half.items()})
    manager.switch_weights("b", scale=2)
    before = state_of(manager)
    with pytest.raises(AdapterError, match="beyond the range of float16"):
        manager.switch_weights("a", scale=1000)
    assert state_of(manager) == before
    with pytest.raises(AdapterError, match="beyond the range of float16"):
        manager.switch_weights("b", scale=1000)
    assert state_of(manager) == before


def test_a_strength_that_the_engine_cannot_hold_leaves_it_unbound() -> None:
    manager = manager_with(False, a=pair(value=100))
    manager.switch_weights("a", scale=1000)
    executor = FakeExecutor(make_manifest(dtype="float16"))
    half = {name: array.astype(np.float16) for name, array in pair(value=100).items()}
    manager = manager_with(False, a=half)
    manager.switch_weights("a", scale=1000)  # in float32, which holds it
    with pytest.raises(AdapterError, match="beyond the range of float16"):
        manager.initialize_engine_bindings(executor)
    manager.switch_weights("a")
    manager.initialize_engine_bindings(executor)
    assert manager.get_active_adapter_name() == "a"


def test_reset_ends_a_strength() -> None:
    manager = manager_with(a=random_pair(0))
    manager.switch_weights("a", scale=3)
    manager.reset_weights()
    assert not manager.has_active_adapter()
    assert not delta(manager, SITE).any()
    manager.switch_weights("a")
    assert_near(delta(manager, SITE), product(random_pair(0)))
