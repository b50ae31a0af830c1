"""`LoRAManager.refresh_tensor_map`: every binding gets the adapter's tensor or the dummy."""

import numpy as np
import pytest
from support.adapters.manager_setup import (
    ANY,
    BINDINGS,
    MANIFEST,
    A,
    B,
    manager_with,
    pair,
    refreshed,
)
from support.fakes.fake_engine import make_weights

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy


def test_a_map_needs_an_engine() -> None:
    tensor_map = TensorMap()
    with pytest.raises(StateError, match="call initialize_engine_bindings"):
        manager_with(False, a=pair()).refresh_tensor_map(tensor_map)
    assert tensor_map == {}


def test_every_binding_gets_the_adapters_tensor_or_the_dummy() -> None:
    manager = manager_with(a=pair(rank=3))
    dummies = refreshed(manager)
    manager.switch_weights("a")
    bound = refreshed(manager)
    assert list(bound) == BINDINGS
    assert {name: bound[name] for name in (A, B)} == {
        name: manager.get_active_weight(name) for name in (A, B)
    }
    for name in set(BINDINGS) - {A, B}:
        assert bound[name] is dummies[name]


def test_a_switch_leaves_nothing_of_the_adapter_before() -> None:
    manager, tensor_map = manager_with(full=make_weights(MANIFEST), a=pair()), TensorMap()
    manager.refresh_tensor_map(tensor_map)
    dummies = dict(tensor_map)
    manager.switch_weights("full")
    manager.refresh_tensor_map(tensor_map)
    manager.switch_weights("a")
    manager.refresh_tensor_map(tensor_map)
    assert tensor_map[ANY] is dummies[ANY]
    manager.reset_weights()
    manager.refresh_tensor_map(tensor_map)
    assert tensor_map == dummies


def test_a_map_changes_only_when_it_is_refreshed() -> None:
    manager = manager_with(a=pair())
    tensor_map = refreshed(manager)
    before = dict(tensor_map)
    manager.switch_weights("a")
    assert tensor_map == before


def test_many_switches_bind_the_same_tensors_again() -> None:
    manager = manager_with(a=make_weights(MANIFEST), b=make_weights(MANIFEST, rank=9, seed=1))
    seen: dict[str, dict[str, Tensor]] = {}
    tensor_map = TensorMap()
    for _ in range(50):
        for name in ("a", "", "b"):
            manager.switch_weights(name) if name else manager.reset_weights()
            manager.refresh_tensor_map(tensor_map)
            assert tensor_map == seen.setdefault(name, dict(tensor_map))
    pointers = {name: [t.pointer for t in bound.values()] for name, bound in seen.items()}
    assert len({*pointers["a"], *pointers["b"], *pointers[""]}) == 8 + 8 + 1


def test_other_keys_of_the_map_are_not_touched() -> None:
    other = tensor_from_numpy(np.arange(3))
    tensor_map = TensorMap({"input_ids": other, "lora_A_of_another_engine": other})
    manager = manager_with(a=pair())
    manager.switch_weights("a")
    manager.refresh_tensor_map(tensor_map)
    assert tensor_map["input_ids"] is tensor_map["lora_A_of_another_engine"] is other
    assert len(tensor_map) == len(BINDINGS) + 2
