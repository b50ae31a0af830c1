"""LoRAManager: what it holds, what it gives back, and who else holds it."""

import weakref
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyEngine
from safetensors.numpy import save_file
from support.adapters.manager_setup import (
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
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_engine import FakeExecutor, make_manifest
from support.models.padding_plan import with_padding_plan

from trt_lora.plugins.errors import AdapterError, StateError, UnknownAdapterError
from trt_lora.runtime import TensorMap, open_engine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.host import ALIGNMENT, Memory
from trt_lora.runtime.memory.tensor import Tensor


def held(tensors: TensorMap) -> list[weakref.ref[object]]:
    """The memory behind the weights of a map, without keeping it alive."""
    owners = {id(t.owner): t.owner for name, t in tensors.items() if name in (A, B)}
    return [weakref.ref(owner) for owner in owners.values()]


def file_of(folder: Path, value: float = 1.0, rank: int = 2) -> Path:
    path = folder / f"{value}.safetensors"
    save_file(pair(rank=rank, value=value), path)
    return path


# ------------------------------------------------------------------------------------------ unload


def test_an_unloaded_adapter_is_gone_and_its_name_is_free() -> None:
    manager = manager_with(a=pair(), b=pair(value=2))
    manager.unload("a")
    assert manager.get_adapter_names() == ["b"]
    manager.add_weights("a", pair(value=3))
    manager.switch_weights("a")
    np.testing.assert_array_equal(refreshed(manager)[A].numpy(), np.full((8, 2), 3))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_active_adapter_is_unloaded_only_by_force(scale: float) -> None:
    manager = manager_with(a=pair(), b=pair())
    manager.switch_weights("a", scale)
    before = state_of(manager)
    with pytest.raises(StateError, match=r"adapter 'a' is active; .*reset_weights.*force=True"):
        manager.unload("a")
    assert state_of(manager) == before
    manager.unload("a", force=True)
    assert (manager.has_active_adapter(), manager.active_scale) == (False, 1.0)
    assert_zero(refreshed(manager)[A], (8, 1))
    assert manager.get_adapter_names() == ["b"]


@pytest.mark.parametrize("force", [True, False])
def test_unloading_another_adapter_leaves_the_active_one_as_it_is(force: bool) -> None:
    manager = manager_with(a=pair(), b=pair())
    manager.switch_weights("a", 0.5)
    before = list(refreshed(manager).items())
    manager.unload("b", force=force)
    assert list(refreshed(manager).items()) == before


@pytest.mark.parametrize("replaces", [True, False])
def test_a_blend_is_gone_with_a_part_but_for_where_it_is_active(replaces: bool) -> None:
    manager = manager_with(a=pair(), b=pair(value=2))
    manager.blend("sum", {"a": 1, "b": 0.5})
    manager.switch_weights("sum")
    before = {name: tensor.numpy().copy() for name, tensor in refreshed(manager).items()}
    if replaces:
        manager.add_weights("b", pair(value=7), replace=True)
    else:
        manager.unload("b")
    for name, tensor in refreshed(manager).items():
        np.testing.assert_array_equal(tensor.numpy(), before[name])
    assert "sum" not in manager.get_adapter_names()
    with pytest.raises(UnknownAdapterError, match="'sum' was made of 'b', which was unloaded or r"):
        manager.switch_weights("sum")
    manager.reset_weights()
    assert manager.store is not None
    manager.store.check_integrity()


def test_a_gpu_has_every_byte_back_when_an_adapter_is_unloaded(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    memory: Memory = CudaMemory()
    manager = LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(MANIFEST, memory))
    manager.load_weights("first", file_of(tmp_path))  # makes the pinned buffers
    before = {block.address for block in cuda.live_blocks()}
    manager.load_weights("a", file_of(tmp_path, 2.0))
    manager.switch_weights("a", 0.5)
    new = [block for block in cuda.live_blocks() if block.address not in before]
    assert [block.memory.size for block in new] == [2 * ALIGNMENT] * 2  # A and B at each strength
    manager.unload("a", force=True)
    assert {block.address for block in cuda.live_blocks()} == before


# ----------------------------------------------------------------------------- who else holds it


def test_a_map_keeps_an_unloaded_adapter_until_it_is_refreshed(tmp_path: Path) -> None:
    manager = manager_with()
    manager.load_weights("a", file_of(tmp_path))
    manager.switch_weights("a", 0.5)
    tensor_map = refreshed(manager)
    memory = held(tensor_map)
    manager.unload("a", force=True)
    assert [each() is None for each in memory] == [False]
    np.testing.assert_array_equal(tensor_map[B].numpy(), np.full((2, 6), 0.5))
    manager.refresh_tensor_map(tensor_map)
    assert [each() is None for each in memory] == [True]


@pytest.mark.parametrize("replaces", [True, False])
def test_an_engine_that_ran_with_an_adapter_does_not_keep_it(
    tiny_engine: TinyEngine, replaces: bool
) -> None:
    with open_engine(tiny_engine.engine, "onnxruntime") as engine:
        manager, tensor_map = LoRAManager(), TensorMap()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("a", tiny_engine.adapter)
        manager.switch_weights("a")
        manager.refresh_tensor_map(tensor_map)
        decoder = StaticDecoder(engine, tensor_map, 1)
        ids = np.array([[3, 1, 4]])
        decoder.run(ids)
        memory = weakref.ref(manager.get_active_weight(manager.get_binding_names()[0]).owner)
        if replaces:
            manager.load_weights("a", tiny_engine.adapter, replace=True)
        else:
            manager.unload("a", force=True)
        manager.refresh_tensor_map(tensor_map)
        del decoder
        assert memory() is None
        StaticDecoder(engine, tensor_map, 1).run(ids)


# ----------------------------------------------------------------------------------------- replace


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_replaced_active_adapter_is_active_at_its_strength_after_a_refresh(
    tmp_path: Path, scale: float
) -> None:
    manager = manager_with(other=pair())
    manager.load_weights("a", file_of(tmp_path))
    manager.add_weights("last", pair())
    manager.switch_weights("a", scale)
    tensor_map = refreshed(manager)
    memory = held(tensor_map)
    manager.load_weights("a", file_of(tmp_path, 3.0, rank=4), replace=True)
    assert manager.get_adapter_names() == ["other", "a", "last"]
    assert (manager.get_active_adapter_name(), manager.active_scale) == ("a", scale)
    np.testing.assert_array_equal(tensor_map[B].numpy(), np.full((2, 6), scale))
    manager.refresh_tensor_map(tensor_map)
    np.testing.assert_array_equal(tensor_map[A].numpy(), np.full((8, 4), 3))
    np.testing.assert_array_equal(tensor_map[B].numpy(), np.full((4, 6), 3 * scale))
    assert all(each() is None for each in memory)


def test_replacing_an_adapter_that_is_not_active_changes_no_map(tmp_path: Path) -> None:
    manager = manager_with(a=pair(), b=pair())
    manager.switch_weights("a", 0.5)
    manager.switch_weights("b")
    before = list(refreshed(manager).items())
    manager.load_weights("a", file_of(tmp_path, 3.0), replace=True)
    assert list(refreshed(manager).items()) == before
    manager.switch_weights("a", 0.5)  # of the new one, though the old one was at this strength
    np.testing.assert_array_equal(refreshed(manager)[B].numpy(), np.full((2, 6), 1.5))


def test_replacing_what_is_not_there_is_loading(tmp_path: Path) -> None:
    manager = manager_with()
    manager.load_weights("a", file_of(tmp_path), replace=True)
    manager.add_weights("b", pair(value=2), replace=True)
    manager.blend("c", {"a": 1, "b": 1}, replace=True)
    assert manager.get_adapter_names() == ["a", "b", "c"]


def test_a_blend_cannot_take_the_place_of_one_of_its_parts() -> None:
    """It could never be made again."""
    manager = manager_with(a=pair(), b=pair(value=2))
    with pytest.raises(
        AdapterError, match=r"blend 'a' has no parts, or is one of them: \['a', 'b'"
    ):
        manager.blend("a", {"a": 1, "b": 1}, replace=True)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["missing", "wide", "diverged"])
def test_a_load_that_fails_leaves_what_it_would_have_replaced(
    tmp_path: Path, kind: str, scale: float
) -> None:
    manager = manager_with(a=pair(), b=pair())
    manager.switch_weights("a", scale)
    path = {
        "missing": tmp_path / "nowhere",
        "wide": file_of(tmp_path, rank=17),
        "diverged": file_of(tmp_path, float("nan")),
    }[kind]
    before = state_of(manager)
    with pytest.raises(AdapterError):
        manager.load_weights("a", path, replace=True)
    assert state_of(manager) == before


def test_where_a_new_adapter_does_not_allow_the_strength_the_old_one_stays_active() -> None:
    half = {name: array.astype(np.float16) for name, array in pair().items()}
    manager = LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(make_manifest(dtype="float16")))
    manager.add_weights("a", half)
    manager.switch_weights("a", 1000)
    before = refreshed(manager)
    large = {name: 100 * array for name, array in half.items()}
    with pytest.raises(AdapterError, match="beyond the range of float16"):
        manager.add_weights("a", large, replace=True)
    assert refreshed(manager) == before
    manager.switch_weights("a")  # it is there
    np.testing.assert_array_equal(refreshed(manager)[B].numpy(), large[B])


# ---------------------------------------------------------------------------------------- strengths


def test_a_strength_does_not_change_what_a_map_was_given_before() -> None:
    manager = manager_with(a=pair(), b=pair(value=2))
    manager.switch_weights("a", 0.5)
    first = refreshed(manager)
    manager.switch_weights("b", 0.75)
    second = refreshed(manager)
    manager.switch_weights("b", 3)
    np.testing.assert_array_equal(first[B].numpy(), np.full((2, 6), 0.5))
    np.testing.assert_array_equal(second[B].numpy(), np.full((2, 6), 1.5))


def test_few_strengths_are_kept_that_are_not_in_use() -> None:
    manager = manager_with(a=pair(), b=pair(value=2))
    memory: list[weakref.ref[object]] = []
    for turn in range(20):
        manager.switch_weights("ab"[turn % 2], 1 + (turn + 1) / 8)
        memory.append(weakref.ref(refreshed(manager)[B].owner))
    assert [each() is None for each in memory] == [True] * 11 + [False] * 9  # one is in use
    manager.switch_weights("b")  # the oldest of nine leaves
    manager.unload("a")
    assert [each() is not None for each in memory[12:]] == [turn % 2 == 1 for turn in range(12, 20)]
    manager.unload("b", force=True)
    assert all(each() is None for each in memory)


def test_a_strength_has_memory_of_its_own() -> None:
    manager = manager_with(a=pair())
    manager.switch_weights("a")
    before: Tensor = refreshed(manager)[A]
    manager.switch_weights("a", 0.5)
    assert refreshed(manager)[A].owner is not before.owner
    np.testing.assert_array_equal(refreshed(manager)[A].numpy(), before.numpy())


# ------------------------------------------------------------------------------- bytes in a report


class PaddingExecutor(FakeExecutor):
    """As one whose plan has our plugin."""

    rank_multiple = 8


@pytest.mark.parametrize(("kind", "rank"), [(FakeExecutor, 3), (PaddingExecutor, 8)])
@pytest.mark.parametrize("late", [True, False])
def test_the_bytes_of_a_report_are_those_of_the_tensors_that_are_held(
    tmp_path: Path, kind: type[FakeExecutor], rank: int, late: bool
) -> None:
    """Whatever the plan was built with: what an executor does not read is not held."""
    path = file_of(tmp_path, rank=3)
    manager = LoRAManager()
    if late:
        manager.load_weights("a", path)
    executor = kind(make_manifest(dtype="float16"))
    manager.initialize_engine_bindings(executor)
    if not late:
        manager.load_weights("a", path)
    manager.blend("b", {"a": 0.5})
    for name in ("a", "b"):
        coverage = manager.get_coverage(name)
        assert coverage is not None
        manager.switch_weights(name)
        tensors = [manager.get_active_weight(binding) for binding in (A, B)]
        assert coverage.nbytes == sum(tensor.nbytes for tensor in tensors) == 2 * rank * (8 + 6)
        (owner,) = {id(tensor.owner): tensor.owner for tensor in tensors}.values()
        assert isinstance(owner, np.ndarray)
        assert owner.nbytes == sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
        assert [site.path for site in coverage.adapted] == [SITE]


def test_an_engine_without_a_gpu_pads_nothing_whatever_its_plan_has(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    plan = with_padding_plan(tiny_engine.engine, tmp_path / "plan")
    with open_engine(plan, "onnxruntime") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        coverage = manager.load_weights("a", tiny_engine.adapter)
        manager.switch_weights("a")
        tensors = [manager.get_active_weight(name) for name in manager.get_binding_names()]
    assert coverage is not None
    assert coverage.nbytes == sum(tensor.nbytes for tensor in tensors)
    assert {min(tensor.shape) for tensor in tensors} == {4}
