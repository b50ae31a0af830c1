"""LoRAManager: every method of the source document, on an engine's promises."""

import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.manager_setup import (
    ANY,
    BINDINGS,
    MANIFEST,
    SITE,
    A,
    B,
    assert_zero,
    manager_with,
    pair,
    refreshed,
    state_of,
)
from support.fakes.fake_engine import (
    FakeExecutor,
    FakeExecutorWithMemory,
    FakeMemory,
    make_manifest,
    make_weights,
    write_peft,
)

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import (
    AdapterError,
    StateError,
    UnknownAdapterError,
    UnknownBindingError,
)
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy


@pytest.mark.parametrize("as_text", [True, False])
def test_a_peft_directory_is_loaded_with_its_scale_folded_in(tmp_path: Path, as_text: bool) -> None:
    factors = {f"{SITE}.lora_A": pair()[A].T.copy(), f"{SITE}.lora_B": pair()[B].T.copy()}
    path = write_peft(tmp_path, factors, r=2, lora_alpha=6)
    manager = manager_with()
    manager.load_weights("a", str(path) if as_text else path)
    manager.switch_weights("a")
    np.testing.assert_array_equal(manager.get_active_weight(A).numpy(), np.ones((8, 2)))
    np.testing.assert_array_equal(manager.get_active_weight(B).numpy(), np.full((2, 6), 3))


def test_the_tensor_names_of_a_safetensors_file_become_binding_names(tmp_path: Path) -> None:
    weights = {"any name": np.ones((2, 3), np.float32), "lora_A_x": np.eye(2, dtype=np.float32)}
    save_file(weights, tmp_path / "a.safetensors")
    manager = LoRAManager()
    manager.load_weights("a", tmp_path / "a.safetensors")
    manager.switch_weights("a")
    assert set(manager.get_binding_names()) == set(weights)
    for name, values in weights.items():
        np.testing.assert_array_equal(manager.get_active_weight(name).numpy(), values)


def test_the_stream_of_a_load_is_the_stream_of_the_upload(tmp_path: Path) -> None:
    save_file(pair(), tmp_path / "a.safetensors")
    executor, manager = FakeExecutorWithMemory(MANIFEST), LoRAManager()
    manager.initialize_engine_bindings(executor)
    manager.load_weights("a", tmp_path / "a.safetensors", stream=1234)
    assert executor.memory.uploads == [({A, B}, 1234)]


def test_registering_an_adapter_does_not_activate_it(tmp_path: Path) -> None:
    save_file(pair(), tmp_path / "a.safetensors")
    manager = manager_with(added=pair())
    manager.load_weights("loaded", tmp_path / "a.safetensors")
    assert manager.get_active_adapter_name() == ""


@pytest.mark.parametrize("bound", [True, False])
def test_a_numpy_array_is_registered_in_place(bound: bool) -> None:
    weights = pair()
    manager = manager_with(bound, a=weights)
    manager.switch_weights("a")
    for name, array in weights.items():
        assert manager.get_active_weight(name).pointer == array.ctypes.data


def test_a_tensor_is_registered_as_the_object_it_is() -> None:
    weights = {name: tensor_from_numpy(array) for name, array in pair().items()}
    manager = manager_with(a=weights)
    manager.switch_weights("a")
    assert manager.get_active_weight(A) is weights[A]


def test_memory_lives_as_long_as_the_manager_and_no_longer() -> None:
    class Owned(np.ndarray[tuple[int, ...], np.dtype[np.float32]]):
        alive = 0

        def __del__(self) -> None:
            Owned.alive -= 1

    weights = {name: array.view(Owned) for name, array in pair().items()}
    Owned.alive = len(weights)
    manager = manager_with(a=weights)
    del weights
    assert Owned.alive == 2
    del manager
    assert Owned.alive == 0


def test_later_changes_to_the_mapping_do_not_reach_the_manager() -> None:
    weights = pair()
    manager = manager_with(a=weights)
    weights.clear()
    manager.switch_weights("a")
    assert manager.has_weight_for(A)


def test_nothing_is_active_at_first() -> None:
    manager = LoRAManager()
    assert not manager.has_active_adapter()
    assert manager.get_active_adapter_name() == ""
    assert manager.get_adapter_names() == []
    assert manager.get_binding_names() == []


def test_switching_activates_the_named_adapter() -> None:
    manager = manager_with(a=pair(), b=pair(value=2))
    for name, value in (("a", 1), ("b", 2), ("a", 1)):
        manager.switch_weights(name)
        assert manager.has_active_adapter()
        assert manager.get_active_adapter_name() == name
        np.testing.assert_array_equal(manager.get_active_weight(A).numpy(), np.full((8, 2), value))


@pytest.mark.parametrize("name", ["c", "", "A"])
def test_an_unknown_adapter_is_refused_and_the_active_one_stays(name: str) -> None:
    manager = manager_with(a=pair(), b=pair())
    manager.switch_weights("b")
    before = state_of(manager)
    with pytest.raises(UnknownAdapterError) as caught:
        manager.switch_weights(name)
    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == f"unknown adapter {name!r}; loaded: a, b"
    assert state_of(manager) == before


def test_switching_without_any_adapter_says_that_none_is_loaded() -> None:
    with pytest.raises(UnknownAdapterError, match="loaded: none"):
        LoRAManager().switch_weights("a")


def test_resetting_deactivates_and_may_be_repeated() -> None:
    manager = manager_with(a=pair())
    manager.switch_weights("a")
    for _ in range(2):
        manager.reset_weights()
        assert not manager.has_active_adapter()
        assert manager.get_active_adapter_name() == ""
    assert manager.get_adapter_names() == ["a"]


def test_the_strength_of_the_active_adapter_can_be_asked_for() -> None:
    manager = manager_with(a=pair())
    assert manager.active_scale == 1
    manager.switch_weights("a", scale=0.5)
    assert manager.active_scale == 0.5
    manager.switch_weights("a")
    assert manager.active_scale == 1
    manager.switch_weights("a", scale=-2)
    manager.reset_weights()
    assert manager.active_scale == 1


@pytest.mark.parametrize("bound", [True, False])
def test_a_zero_of_shape_1_stands_in_while_no_adapter_is_active(bound: bool) -> None:
    manager = manager_with(bound, a=pair())
    assert_zero(manager.get_active_weight(A), (1,))
    assert_zero(manager.get_active_weight("no binding at all"), (1,))
    manager.switch_weights("a")
    manager.reset_weights()
    assert_zero(manager.get_active_weight(A), (1,))


@pytest.mark.parametrize("bound", [True, False])
def test_a_binding_that_the_active_adapter_lacks_is_an_error(bound: bool) -> None:
    manager = manager_with(bound, a=pair(), b=make_weights(MANIFEST))
    manager.switch_weights("a")
    with pytest.raises(UnknownBindingError, match="'a', which has 2 bindings") as caught:
        manager.get_active_weight(ANY)
    assert isinstance(caught.value, KeyError)
    assert str(caught.value).startswith(f"binding {ANY!r} ")


def test_binding_names_are_those_of_all_adapters_each_once() -> None:
    manager = manager_with(b=pair(), a=make_weights(MANIFEST))
    assert manager.get_adapter_names() == ["b", "a"]
    assert sorted(manager.get_binding_names()) == sorted(BINDINGS)


def test_lists_of_names_are_the_callers_own() -> None:
    manager = manager_with(a=pair())
    manager.get_adapter_names().clear()
    manager.get_binding_names().clear()
    assert (manager.get_adapter_names(), len(manager.get_binding_names())) == (["a"], 2)


def test_only_the_active_adapter_has_weights() -> None:
    manager = manager_with(a=pair(), b=make_weights(MANIFEST))
    assert not manager.has_weight_for(A)
    manager.switch_weights("a")
    assert manager.has_weight_for(A)
    assert not manager.has_weight_for(ANY)
    manager.switch_weights("b")
    assert manager.has_weight_for(ANY)
    manager.reset_weights()
    assert not manager.has_weight_for(ANY)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dummies_are_rank_1_zeros_of_the_engines_other_dimension(dtype: str) -> None:
    manager = LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(make_manifest(k=8, n=6, dtype=dtype)))
    for name, tensor in refreshed(manager).items():
        assert_zero(tensor, (8, 1) if name.startswith("lora_A") else (1, 6))
        assert (tensor.dtype, tensor.device) == (dtype, "cpu")


def test_all_dummies_alias_one_zero_buffer() -> None:
    manager = manager_with()
    tensors = [*refreshed(manager).values(), manager.get_active_weight(A)]
    assert len({tensor.pointer for tensor in tensors}) == 1


def test_the_zero_buffer_lives_as_long_as_a_map_that_holds_a_dummy() -> None:
    buffers: list[weakref.ref[Array]] = []

    class Memory(FakeMemory):
        def zeros(self, nbytes: int, *, sparse: bool = False) -> Tensor:
            array = np.zeros(nbytes, np.bool_)
            buffers.append(weakref.ref(array))
            return tensor_from_numpy(array)

    executor, manager = FakeExecutorWithMemory(MANIFEST), LoRAManager()
    executor.memory = Memory()
    manager.initialize_engine_bindings(executor)
    tensor_map = refreshed(manager)
    del executor, manager
    assert [buffer() is None for buffer in buffers] == [False]
    tensor_map.clear()
    assert [buffer() is None for buffer in buffers] == [True]


def test_dummies_and_weights_live_in_the_memory_of_the_executor() -> None:
    executor, manager = FakeExecutorWithMemory(MANIFEST), LoRAManager()
    manager.add_weights("early", pair())
    manager.initialize_engine_bindings(executor)
    manager.add_weights("late", pair())
    assert [names for names, _ in executor.memory.uploads] == [{A, B}, {A, B}]
    for name in ("early", "late"):
        manager.switch_weights(name)
        assert {tensor.device for tensor in refreshed(manager).values()} == {"cuda:7"}
    manager.reset_weights()
    assert manager.get_active_weight(A).device == "cuda:7"


def test_a_second_engine_is_refused_and_changes_nothing() -> None:
    manager = manager_with(a=pair())
    manager.switch_weights("a")
    before = state_of(manager)
    with pytest.raises(StateError, match="make a LoRAManager per engine"):
        manager.initialize_engine_bindings(FakeExecutor(make_manifest(k=4)))
    assert state_of(manager) == before


def test_an_adapter_loaded_before_the_engine_is_fitted_to_it(tmp_path: Path) -> None:
    save_file(pair(), tmp_path / "a.safetensors")
    manager = LoRAManager()
    manager.load_weights("a", tmp_path / "a.safetensors")
    manager.switch_weights("a")
    engine = make_manifest(dtype="float16", names=BindingNames.EDGELLM)
    manager.initialize_engine_bindings(FakeExecutor(engine))
    assert manager.get_active_adapter_name() == "a"
    assert manager.get_binding_names() == [f"{SITE}.lora_A.weight", f"{SITE}.lora_B.weight"]
    assert manager.get_active_weight(f"{SITE}.lora_A.weight").dtype == "float16"
    assert refreshed(manager).keys() == engine.lora_bindings.keys()


def test_an_adapter_loaded_before_that_does_not_fit_leaves_the_manager_without_an_engine() -> None:
    manager = manager_with(False, good=pair(), wide=pair(rank=17))
    manager.switch_weights("wide")
    with pytest.raises(AdapterError, match=r"wide: .* has rank 17; this engine takes 1 to 16"):
        manager.initialize_engine_bindings(FakeExecutorWithMemory(MANIFEST))
    with pytest.raises(StateError):
        manager.refresh_tensor_map(TensorMap())
    assert manager.get_active_adapter_name() == "wide"
    assert manager.get_adapter_names() == ["good", "wide"]
    assert manager.get_active_weight(A).device == "cpu"
    manager.reset_weights()
    assert_zero(manager.get_active_weight(A), (1,))
    assert manager.get_active_weight(A).device == "cpu"
